"""A text with images is read as the model's own processor reads it, or refused with the reason."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec import json, structs
from torch import Tensor, nn

from engine.config import EngineConfig, LoRAConfig
from engine.errors import ModelRefused, RequestRefused
from engine.models.causal_model import PreparedModel
from engine.models.image_processor import load_processor
from engine.models.loading import load_model
from engine.models.tokenization import CHARACTERS_PER_TOKEN_MAX, prompt_tokens
from messages.requests import IllustratedPrompt
from tests.support.engine.image_bench import KINDS
from tests.support.models.image_examples import (
    ILLUSTRATED,
    build_with_processor,
    illustrated,
    picture,
)

SQUARE = picture(16, 16, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedModel]:
    made = {}
    for kind in KINDS:
        directory = tmp_path_factory.mktemp(kind)
        build_with_processor(kind, directory)
        model = load_model(EngineConfig(directory), LoRAConfig())
        assert isinstance(model, PreparedModel)
        made[kind] = model
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a cat", "a @ and @"], ids=["none", "two"])
def test_an_image_stands_once_in_the_text(
    models: dict[str, PreparedModel], kind: str, text: str
) -> None:
    placeholder = models[kind].reader.placeholder
    assert placeholder in ILLUSTRATED[kind].shown
    words = rf"'{placeholder}' {text.count('@')} times and the prompt 1 images"
    with pytest.raises(RequestRefused, match=words.replace("|", r"\|")):
        models[kind].reader.read(illustrated(kind, text, SQUARE))


STRAY = {
    "gemma3": ("a @ <soft>", "'<soft>'.*'<boi>'"),
    "qwen2_vl": ("a @ <|video_pad|>", "video_pad.*image_pad"),
}


@pytest.mark.parametrize("kind", STRAY)
def test_a_text_has_no_token_of_an_image_that_is_not_there(
    models: dict[str, PreparedModel], kind: str
) -> None:
    text, words = STRAY[kind]
    with pytest.raises(RequestRefused, match=words):
        models[kind].reader.read(illustrated(kind, text, SQUARE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_alone_has_no_token_of_an_image(models: dict[str, PreparedModel], kind: str) -> None:
    image = ILLUSTRATED[kind].image_token
    with pytest.raises(RequestRefused, match="stands for an image"):
        prompt_tokens(models[kind], f"a cat {image}")
    with pytest.raises(RequestRefused, match="text alone"):
        prompt_tokens(models[kind], illustrated(kind, "@", SQUARE))


def test_placeholders_that_the_model_would_take_for_one_image_are_refused(
    models: dict[str, PreparedModel],
) -> None:
    prompt = illustrated("qwen2_vl", "<|vision_start|>@@<|vision_end|>", SQUARE, picture(8, 24))
    together = prompt.text.replace("<|vision_end|><|vision_start|>", "")
    with pytest.raises(RequestRefused, match="can't take these images in this text"):
        models["qwen2_vl"].reader.read(structs.replace(prompt, text=together))


def test_an_image_that_the_processor_can_not_scale_is_refused(
    models: dict[str, PreparedModel],
) -> None:
    with pytest.raises(RequestRefused, match="aspect ratio"):
        models["qwen2_vl"].reader.read(illustrated("qwen2_vl", "@", picture(1000, 2)))


def test_the_images_tokens_count_in_the_context(models: dict[str, PreparedModel]) -> None:
    model = models["gemma3"]
    allowed = model.context_tokens_max
    found = model.reader.read(illustrated("gemma3", "@", SQUARE))
    length = len(found.tokens)
    assert length > len(model.tokenizer("<boi>")["input_ids"]) + 4
    fitting = illustrated("gemma3", "@", SQUARE)
    assert model.reader.read(fitting, allowed - length).tokens == found.tokens
    with pytest.raises(RequestRefused, match=f"a prompt of {length} tokens .* {allowed}"):
        model.reader.read(fitting, allowed - length + 1)
    text = "@" + "a" * allowed * CHARACTERS_PER_TOKEN_MAX
    with pytest.raises(RequestRefused, match="characters"):
        model.reader.read(illustrated("gemma3", text, SQUARE))


def test_which_image_is_unsound_is_told(models: dict[str, PreparedModel]) -> None:
    prompt = illustrated("llava", "@ @", SQUARE, SQUARE)
    spoilt = IllustratedPrompt(prompt.text, (prompt.images[0], prompt.images[1][:60]))
    with pytest.raises(RequestRefused, match="image 2 "):
        models["llava"].reader.read(spoilt)


def test_a_model_that_takes_images_may_have_a_default_adapter_for_them(tmp_path: Path) -> None:
    build_with_processor("llava", tmp_path)
    model = load_model(EngineConfig(tmp_path), LoRAConfig(default_mm_loras={"image": "a"}))
    assert not model.without_images
    with pytest.raises(ModelRefused, match="'video'"):
        load_model(EngineConfig(tmp_path), LoRAConfig(default_mm_loras={"video": "a"}))


UNSOUND = {
    "no json": ("processor_config.json", b"{", "can't be made"),
    "an unknown class": ("processor_config.json", b'{"processor_class": "Nobody"}', "no processor"),
    "no processor": ("processor_config.json", b'{"processor_class": "AutoModel"}', "AutoModel"),
    "no pixels": ("preprocessor_config.json", b"[]", "can't be made"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_is_read_from_one_file_as_well(kind: str, tmp_path: Path) -> None:
    build_with_processor(kind, tmp_path)
    one, other = tmp_path / "processor_config.json", tmp_path / "preprocessor_config.json"
    # As a machine with torchvision saves it.
    pixels = json.decode(other.read_bytes())
    pixels["image_processor_type"] = pixels["image_processor_type"].removesuffix("Pil") + "Fast"
    videos = {"video_processor_type": "Qwen2VLVideoProcessor"}
    nested = {"image_processor": pixels, "video_processor": videos}
    one.write_bytes(json.encode(json.decode(one.read_bytes()) | nested))
    other.unlink()
    model = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert model.without_images == ""


@pytest.mark.parametrize("case", UNSOUND)
def test_a_processor_that_can_not_be_made_leaves_the_model_to_text(
    tmp_path: Path, case: str
) -> None:
    name, data, words = UNSOUND[case]
    build_with_processor("llava", tmp_path)
    (tmp_path / name).write_bytes(data)
    model = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert isinstance(model, PreparedModel)
    assert model.reader is None
    assert words in model.without_images
    assert prompt_tokens(model, "a cat")


def test_a_processor_of_another_model_leaves_the_model_to_text(tmp_path: Path) -> None:
    build_with_processor("llava", tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_bytes(json.encode(json.decode(path.read_bytes()) | {"patch_size": 2}))
    model = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert isinstance(model, PreparedModel)
    assert model.reader is None
    assert "did not pass a trial with images" in model.without_images


class Mixed(nn.Module):
    """Makes of every image something of all images."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found + found.mean(0)


def test_a_model_whose_rows_see_each_others_images_is_left_to_text(tmp_path: Path) -> None:
    model = build_with_processor("llava", tmp_path)
    processor = load_processor(tmp_path, model.config)
    model.model.multi_modal_projector = Mixed(model.model.multi_modal_projector)
    prepared = PreparedModel(model, LoRAConfig(), processor.tokenizer, processor=processor)
    assert prepared.reader is None
    assert "otherwise than alone" in prepared.without_images


def test_a_model_that_takes_no_pixels_is_left_to_text(tmp_path: Path) -> None:
    whole = build_with_processor("llava", tmp_path)
    processor = load_processor(tmp_path, whole.config)
    text = PreparedModel(_text_model(), LoRAConfig(), processor.tokenizer, processor=processor)
    assert text.reader is None
    assert "takes no pixels" in text.without_images


def _text_model() -> nn.Module:
    from tests.support.parallel.models import build  # noqa: PLC0415

    return build("llama")


def test_reading_twice_gives_the_same_bits(models: dict[str, PreparedModel]) -> None:
    for kind, model in models.items():
        prompt = illustrated(kind, "a @ cat", SQUARE)
        first, second = model.reader.read(prompt), model.reader.read(prompt)
        assert first.tokens == second.tokens
        assert first.media.tensors.keys() == second.media.tensors.keys()
        for name, tensor in first.media.tensors.items():
            assert torch.equal(tensor, second.media.tensors[name]), (kind, name)


def test_threads_that_read_side_by_side_do_not_meet(models: dict[str, PreparedModel]) -> None:
    reader = models["qwen2_vl"].reader
    prompts = [illustrated("qwen2_vl", f"{n} @ cat", picture(9 + n, 30, n)) for n in range(16)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(reader.read, prompts))
    for one, prompt in zip(found, prompts, strict=True):
        expected = reader.read(prompt)
        assert one.tokens == expected.tokens
        pixels = (reading.media.tensors["pixel_values"] for reading in (one, expected))
        assert torch.equal(*pixels)
