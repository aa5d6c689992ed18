"""A text with images is read by the model's own processor, or refused with the reason."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec import json, structs
from torch import Tensor, nn

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import Malformed, ModelRefused
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import load_processor
from loradock.engine.models.loading import load_model
from loradock.engine.models.tokenization import CHARACTERS_PER_TOKEN_MAX, prompt_tokens
from loradock.messages.prompts import MultimodalPrompt
from tests.support.engine.image_bench import KINDS
from tests.support.models.image_examples import (
    IMAGE_MODELS,
    build_with_processor,
    image_prompt,
    picture,
)

SQUARE = picture(16, 16, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalModel]:
    prepared_by_kind = {}
    for kind in KINDS:
        directory = tmp_path_factory.mktemp(kind)
        build_with_processor(kind, directory)
        model = load_model(EngineConfig(directory), LoRAConfig())
        assert isinstance(model, CausalModel)
        prepared_by_kind[kind] = model
    return prepared_by_kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["a cat", "a @ and @"], ids=["none", "two"])
def test_the_text_has_one_placeholder_per_image(
    models: dict[str, CausalModel], kind: str, text: str
) -> None:
    placeholder = models[kind].prompt_reader.placeholder
    assert placeholder in IMAGE_MODELS[kind].shown
    words = rf"'{placeholder}' {text.count('@')} times and the prompt 1 images"
    with pytest.raises(Malformed, match=words.replace("|", r"\|")):
        models[kind].prompt_reader.read(image_prompt(kind, text, SQUARE))


STRAY = {
    "gemma3": ("a @ <soft>", "'<soft>'.*'<boi>'"),
    "qwen2_vl": ("a @ <|video_pad|>", "video_pad.*image_pad"),
}


@pytest.mark.parametrize("kind", STRAY)
def test_a_text_has_no_token_of_an_absent_image(models: dict[str, CausalModel], kind: str) -> None:
    text, words = STRAY[kind]
    with pytest.raises(Malformed, match=words):
        models[kind].prompt_reader.read(image_prompt(kind, text, SQUARE))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_alone_has_no_token_of_an_image(models: dict[str, CausalModel], kind: str) -> None:
    image = IMAGE_MODELS[kind].image_token
    with pytest.raises(Malformed, match="stands for an image"):
        prompt_tokens(models[kind], f"a cat {image}")
    with pytest.raises(Malformed, match="text alone"):
        prompt_tokens(models[kind], image_prompt(kind, "@", SQUARE))


def test_placeholders_that_the_model_would_read_as_one_image_are_refused(
    models: dict[str, CausalModel],
) -> None:
    prompt = image_prompt("qwen2_vl", "<|vision_start|>@@<|vision_end|>", SQUARE, picture(8, 24))
    together = prompt.text.replace("<|vision_end|><|vision_start|>", "")
    with pytest.raises(Malformed, match="can't read these images in this text"):
        models["qwen2_vl"].prompt_reader.read(structs.replace(prompt, text=together))


def test_an_image_that_the_processor_can_not_scale_is_refused(
    models: dict[str, CausalModel],
) -> None:
    with pytest.raises(Malformed, match="aspect ratio"):
        models["qwen2_vl"].prompt_reader.read(image_prompt("qwen2_vl", "@", picture(1000, 2)))


def test_the_images_tokens_count_in_the_context(models: dict[str, CausalModel]) -> None:
    model = models["gemma3"]
    allowed = model.max_model_len
    found = model.prompt_reader.read(image_prompt("gemma3", "@", SQUARE))
    length = len(found.tokens)
    assert length > len(model.tokenizer("<boi>")["input_ids"]) + 4
    fitting = image_prompt("gemma3", "@", SQUARE)
    assert model.prompt_reader.read(fitting, allowed - length).tokens == found.tokens
    refusal = rf"context length is {allowed} tokens, .*it has {length} tokens"
    with pytest.raises(Malformed, match=refusal):
        model.prompt_reader.read(fitting, allowed - length + 1)
    text = "@" + "a" * allowed * CHARACTERS_PER_TOKEN_MAX
    with pytest.raises(Malformed, match="characters"):
        model.prompt_reader.read(image_prompt("gemma3", text, SQUARE))


def test_the_error_names_the_damaged_image(models: dict[str, CausalModel]) -> None:
    prompt = image_prompt("llava", "@ @", SQUARE, SQUARE)
    damaged = MultimodalPrompt(prompt.text, (prompt.images[0], prompt.images[1][:60]))
    with pytest.raises(Malformed, match="image 2 "):
        models["llava"].prompt_reader.read(damaged)


def test_a_model_with_images_may_have_a_default_adapter_for_them(tmp_path: Path) -> None:
    build_with_processor("llava", tmp_path)
    model = load_model(EngineConfig(tmp_path), LoRAConfig(default_mm_loras={"image": "a"}))
    assert not model.no_images_reason
    with pytest.raises(ModelRefused, match="'video'"):
        load_model(EngineConfig(tmp_path), LoRAConfig(default_mm_loras={"video": "a"}))


BROKEN_FILES = {
    "no json": ("processor_config.json", b"{", "can't be made"),
    "an unknown class": (
        "processor_config.json",
        b'{"processor_class": "Unknown"}',
        "no processor",
    ),
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
    assert model.no_images_reason == ""


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_model_without_a_working_processor_serves_text_alone(tmp_path: Path, case: str) -> None:
    name, data, words = BROKEN_FILES[case]
    build_with_processor("llava", tmp_path)
    (tmp_path / name).write_bytes(data)
    model = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert isinstance(model, CausalModel)
    assert model.prompt_reader is None
    assert words in model.no_images_reason
    assert prompt_tokens(model, "a cat")


def test_a_model_with_another_models_processor_serves_text_alone(tmp_path: Path) -> None:
    build_with_processor("llava", tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_bytes(json.encode(json.decode(path.read_bytes()) | {"patch_size": 2}))
    model = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert isinstance(model, CausalModel)
    assert model.prompt_reader is None
    assert "did not pass the probe with images" in model.no_images_reason


class MixedImages(nn.Module):
    """A projector whose output for each image depends on all images."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.inner(x)
        return states + states.mean(0)


def test_a_model_that_mixes_rows_images_serves_text_alone(tmp_path: Path) -> None:
    model = build_with_processor("llava", tmp_path)
    processor = load_processor(tmp_path, model.config)
    model.model.multi_modal_projector = MixedImages(model.model.multi_modal_projector)
    prepared = CausalModel(model, LoRAConfig(), processor.tokenizer, processor=processor)
    assert prepared.prompt_reader is None
    assert "differ from the row alone" in prepared.no_images_reason


def test_a_model_without_pixel_values_serves_text_alone(tmp_path: Path) -> None:
    whole = build_with_processor("llava", tmp_path)
    processor = load_processor(tmp_path, whole.config)
    text = CausalModel(_text_model(), LoRAConfig(), processor.tokenizer, processor=processor)
    assert text.prompt_reader is None
    assert "no argument pixel_values" in text.no_images_reason


def _text_model() -> nn.Module:
    from tests.support.parallel.models import build  # noqa: PLC0415

    return build("llama")


def test_reading_twice_returns_the_same_bits(models: dict[str, CausalModel]) -> None:
    for kind, model in models.items():
        prompt = image_prompt(kind, "a @ cat", SQUARE)
        first, second = model.prompt_reader.read(prompt), model.prompt_reader.read(prompt)
        assert first.tokens == second.tokens
        assert first.images.tensors.keys() == second.images.tensors.keys()
        for name, tensor in first.images.tensors.items():
            assert torch.equal(tensor, second.images.tensors[name]), (kind, name)


def test_concurrent_reads_are_independent(models: dict[str, CausalModel]) -> None:
    reader = models["qwen2_vl"].prompt_reader
    prompts = [image_prompt("qwen2_vl", f"{n} @ cat", picture(9 + n, 30, n)) for n in range(16)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(reader.read, prompts))
    for processed, prompt in zip(found, prompts, strict=True):
        expected = reader.read(prompt)
        assert processed.tokens == expected.tokens
        pixels = (one.images.tensors["pixel_values"] for one in (processed, expected))
        assert torch.equal(*pixels)
