"""Tiny image-text models saved with processors, pictures, and prompts with them.

For each type of `image_text_examples`, a tokenizer is trained on the spot, and the type's own image
processor is used at small sizes. Models are saved as `transformers` saves them, so that an engine
loads them like any other.
"""

from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaNextImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
)

from loradock.messages.prompts import MultimodalPrompt
from tests.support.models.image_text_examples import KINDS, MORE_KINDS, TEXT

VOCABULARY = 300
CORPUS = ("a cat and a dog sit on the mat", "what is this? it is the picture of a cat")
SQUARE = {"height": 8, "width": 8}
SMALL = {"max_position_embeddings": 256, "vocab_size": VOCABULARY, "initializer_range": 0.3}


class ProcessorSpec(NamedTuple):
    """How to make a model type's processor; `shown`: the text that stands for an image."""

    processor: str
    special: tuple[str, ...]
    image_token: str
    shown: str
    images: Callable[..., Any]
    fields: Mapping[str, Any] = MappingProxyType({})
    named: Mapping[str, str] = MappingProxyType({})


_qwen = partial(Qwen2VLImageProcessorPil, patch_size=4, min_pixels=64, max_pixels=512, merge_size=2)


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN = (QWEN_TOKENS, "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", _qwen)
GEMMA_NAMED = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
IDEFICS_TOKENS = (
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
LLAVA_FIELDS = {
    "patch_size": 4,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
PINPOINTS = [[8, 8], [8, 16], [16, 8], [16, 16]]
INTERN_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
IMAGE_MODELS = {
    "llava": ProcessorSpec(
        "LlavaProcessor",
        ("<image>",),
        "<image>",
        "<image>",
        partial(CLIPImageProcessorPil, size={"shortest_edge": 8}, crop_size=SQUARE),
        LLAVA_FIELDS,
    ),
    "gemma3": ProcessorSpec(
        "Gemma3Processor",
        ("<boi>", "<eoi>", "<soft>"),
        "<soft>",
        "<boi>",
        partial(Gemma3ImageProcessorPil, size=SQUARE),
        {"image_seq_length": 4},
        GEMMA_NAMED,
    ),
    "idefics3": ProcessorSpec(
        "Idefics3Processor",
        IDEFICS_TOKENS,
        "<image>",
        "<image>",
        partial(
            Idefics3ImageProcessorPil,
            size={"longest_edge": 16},
            max_image_size={"longest_edge": 8},
        ),
        {"image_seq_len": 1},
    ),
    "qwen2_vl": ProcessorSpec("Qwen2VLProcessor", *QWEN),
    "qwen2_5_vl": ProcessorSpec("Qwen2_5_VLProcessor", *QWEN),
    "qwen3_vl": ProcessorSpec("Qwen3VLProcessor", *QWEN),
    "llava_next": ProcessorSpec(
        "LlavaNextProcessor",
        ("<image>",),
        "<image>",
        "<image>",
        partial(
            LlavaNextImageProcessorPil,
            size={"shortest_edge": 8},
            crop_size=SQUARE,
            image_grid_pinpoints=PINPOINTS,
        ),
        LLAVA_FIELDS,
    ),
    "internvl": ProcessorSpec(
        "InternVLProcessor",
        tuple(INTERN_NAMED.values()),
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        partial(
            GotOcr2ImageProcessorPil,
            size=SQUARE,
            crop_to_patches=True,
            min_patches=1,
            max_patches=4,
        ),
        {"image_seq_length": 1},
        INTERN_NAMED,
    ),
}
"""The model types that are compared with PEFT with images."""

_CONFIGS = {
    **KINDS,
    **MORE_KINDS,
    "llava_next": (*KINDS["llava"][:2], {"image_grid_pinpoints": PINPOINTS}),
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return coloured noise."""
    values = torch.randint(
        0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(values.to(torch.uint8).numpy())


def png(image: Image.Image) -> bytes:
    """Return an image as a PNG file."""
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_prompt(kind: str, text: str, *images: Image.Image) -> MultimodalPrompt:
    """Return `text` with the type's placeholder for each `@`, and the images."""
    shown = text.replace("@", IMAGE_MODELS[kind].shown)
    return MultimodalPrompt(shown, tuple(png(image) for image in images))


def tokenizer(special: tuple[str, ...], named: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on `CORPUS`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<pad>", "<s>", "</s>", *special],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends, extra_special_tokens=dict(named))


def build_with_processor(kind: str, directory: Path, **image_fields: Any) -> PreTrainedModel:
    """Save a random model of this type in `directory` with its processor, and return the model."""
    spec = IMAGE_MODELS[kind]
    words = tokenizer(spec.special, spec.named)
    model = _build(kind, words.convert_tokens_to_ids)
    model.save_pretrained(directory)
    words.save_pretrained(directory)
    spec.images(**image_fields).save_pretrained(directory)
    (directory / "processor_config.json").write_text(
        msgspec.json.encode({"processor_class": spec.processor, **spec.fields}).decode()
    )
    return model


def _build(kind: str, token_id: Callable[[str], int]) -> PreTrainedModel:
    text, vision, own = _CONFIGS[kind]
    own = {name: value for name, value in own.items() if "image_token" not in name}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(
        kind,
        text_config={**TEXT, **text, **SMALL, **ids},
        vision_config=vision,
        image_token_id=token_id(IMAGE_MODELS[kind].image_token),
        video_token_id=token_id("<|video_pad|>") if kind.startswith("qwen") else None,
        **own,
        **ids,
    )
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        # A projector initialized to zeros would hide every image.
        if not parameter.any() and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model
