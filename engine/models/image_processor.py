"""A text with images as its model reads it: the processor that the model was saved with, asked.

What it is: a processor from a model's directory, and one prompt through it, to token ids and
tensors. What it is not: a list of models; what a model takes is told by its forward's own
arguments. One rule: what a client can get wrong is refused here, for a batch that a wrong prompt
joined would fail whole.

A processor is not made for several threads: they decode files side by side, and ask it one by one.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

from engine.errors import FOREIGN_FAILURES, RequestRefused
from engine.models.served_model import ServedModel
from engine.models.tokenization import check_text, check_tokens
from engine.models.vision.decoding import open_images
from engine.models.vision.media import Media
from messages.requests import IllustratedPrompt

LOCAL: Final[Mapping[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
"""How everything is loaded: nothing remote, no foreign code."""

_FILES: Final = ("processor_config.json", "preprocessor_config.json")
_VIDEO_PART: Final = "video_processor"
_TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids")

Processor = Any
"""A `transformers` processor; the library brings no types."""


class ImagesRefused(Exception):  # noqa: N818 - named by what was found, as the engine's errors
    """This model is served for text alone, and why."""


class Reading(NamedTuple):
    """A prompt as a model takes it; `media` None: text alone."""

    tokens: list[int]
    media: Media | None = None


def load_processor(directory: Path, config: Any) -> Processor:
    """The processor that a model was saved with; raises `ImagesRefused` where there is none.

    Its images go through Pillow, on every machine alike. It has no part for videos, which wants
    torchvision even to be made.
    """
    if not any((directory / name).is_file() for name in _FILES):
        raise ImagesRefused(f"the model's directory has neither {' nor '.join(_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **LOCAL)
        parts = {
            "tokenizer": tokenizer,
            "image_processor": AutoImageProcessor.from_pretrained(
                directory, backend="pil", **LOCAL
            ),
            _VIDEO_PART: None,
        }
        kind = _without_videos(_class_of(directory, config, tokenizer))
        saved, _ = kind.get_processor_dict(directory, local_files_only=True)
        return kind.from_args_and_dict([parts[name] for name in kind.get_attributes()], saved)
    except (*FOREIGN_FAILURES, OSError, ImportError) as error:
        raise ImagesRefused(
            f"the model's own processor can't be made ({type(error).__name__}: {error})"
        ) from error


def _class_of(directory: Path, config: Any, tokenizer: Any) -> type[Any]:
    """The class that the saved files name, or else the one that belongs to the model's config."""
    saved, _ = ProcessorMixin.get_processor_dict(directory, local_files_only=True)
    named = saved.get("processor_class") or tokenizer.init_kwargs.get("processor_class")
    kind = processor_class_from_name(named) if named else PROCESSOR_MAPPING[type(config)]
    if not (isinstance(kind, type) and issubclass(kind, ProcessorMixin)):
        raise TypeError(f"{kind} is no processor that the library has here; some want torchvision")
    return kind


class _WithoutVideos:
    """Before a processor's class: it may lack the part for videos."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        """The class that a part has to be of, checked."""
        if name == _VIDEO_PART and argument is None:
            return type(None)
        return super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


def _without_videos(kind: Any) -> Any:
    if _VIDEO_PART not in kind.get_attributes():
        return kind
    return type(kind.__name__, (_WithoutVideos, kind), {})


class ImageReader:
    """Reads prompts with images for one model; any thread may call it.

    `accepts`: the names of the arguments of the model's forward. Raises `ImagesRefused` where the
    two don't fit.
    """

    def __init__(self, processor: Processor, model: ServedModel, accepts: frozenset[str]) -> None:
        if "pixel_values" not in accepts:
            raise ImagesRefused("the model takes no pixels")
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        if not self.placeholder:
            raise ImagesRefused("the model's processor has no placeholder for an image")
        self._processor = processor
        self._one_by_one = Lock()
        self._model = model
        self._accepts = accepts
        # Where positions are counted in several axes, the model knows how, without any state.
        self._rope_index: Callable[..., Any] | None = getattr(
            model.model.base_model, "get_rope_index", None
        )

    def read(self, prompt: IllustratedPrompt, wanted: int = 0) -> Reading:
        """A prompt that leaves `wanted` tokens of the context; raises `RequestRefused`."""
        check_text(self._model, prompt.text)
        with self._one_by_one:
            self._check_placeholders(prompt)
        images = open_images(prompt.images)
        try:
            with self._one_by_one:
                found = self._processor(text=[prompt.text], images=images, return_tensors="pt")
            tokens = found.pop("input_ids")[0]
            check_tokens(self._model, tokens.tolist(), wanted)
            return Reading(tokens.tolist(), self._media(tokens, found, len(images)))
        except FOREIGN_FAILURES as error:
            raise RequestRefused(
                f"the model's processor can't take these images in this text: {str(error)[:300]}"
            ) from error

    def is_media(self, token: int) -> bool:
        """Whether a token stands for an image or the like."""
        return token in self._model.media_tokens

    def _check_placeholders(self, prompt: IllustratedPrompt) -> None:
        """One placeholder an image, and nothing else that the model would look for an image at."""
        found, wanted = prompt.text.count(self.placeholder), len(prompt.images)
        if found != wanted:
            raise RequestRefused(
                f"the text has {self.placeholder!r} {found} times and the prompt {wanted} images; "
                "write it once for each image, in their order"
            )
        tokenizer = self._processor.tokenizer
        own = tokenizer.convert_tokens_to_ids(self.placeholder)
        tokens = tokenizer(prompt.text)["input_ids"]
        stray = self._model.media_tokens.intersection(tokens) - {own}
        if stray or tokens.count(own) != wanted:
            word = tokenizer.convert_ids_to_tokens(min(stray, default=own))
            raise RequestRefused(
                f"{word!r} in the text stands for an image, a video or a sound that the prompt "
                f"does not bring; an image's place is {self.placeholder!r}"
            )

    def _media(self, tokens: Tensor, found: Mapping[str, Any], images: int) -> Media:
        """What the processor found beside the tokens, as far as the model's forward takes it."""
        types = {name: found[name] for name in _TOKEN_TYPES if name in found}
        tensors = {
            name: self._as_model(value)
            for name, value in found.items()
            if name not in (*_TOKEN_TYPES, "attention_mask")
        }
        foreign = set(tensors).difference(self._accepts)
        if foreign:
            raise ValueError(f"the model's forward takes no {', '.join(sorted(foreign))}")
        positions, offset = self._positions({"input_ids": tokens[None], **types, **tensors})
        own = {name: value[0] for name, value in types.items() if name in self._accepts}
        return Media(tensors, own, positions, offset, images)

    def _as_model(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"a {type(value).__name__} where a tensor was expected")
        return value.to(self._model.model.dtype) if value.is_floating_point() else value

    def _positions(self, given: Mapping[str, Tensor]) -> tuple[Tensor | None, int]:
        if self._rope_index is None:
            return None, 0
        wanted = inspect.signature(self._rope_index).parameters
        with torch.inference_mode():
            positions, deltas = self._rope_index(**{n: x for n, x in given.items() if n in wanted})
        return positions[:, 0], int(deltas)
