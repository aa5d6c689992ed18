"""Prompts with images as a model reads them, by the processor that was saved with the model.

Mistakes of a client are refused here, because one wrong prompt would fail the whole batch that it
joined. Format and size of a file are checked from its header, before anything is decoded; every
image becomes RGB, the colour space that models were trained on. Processors are not thread-safe:
threads decode image files concurrently, and call the processor one at a time.
"""

import inspect
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import torch
from PIL import Image, ImageOps
from torch import Tensor

from loradock.engine.errors import MODEL_CODE_ERRORS, Malformed, ModelRefused
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.library.names import (
    PROCESSOR_MAPPING,
    AutoImageProcessor,
    AutoTokenizer,
    ProcessorMixin,
    processor_class_from_name,
)
from loradock.engine.models.observation import check_same
from loradock.engine.models.probing import Forward, MakeCache, prefill_and_decode
from loradock.engine.models.saved_weights import LOCAL
from loradock.engine.models.served_model import ServedModel
from loradock.engine.models.tokenization import check_text, check_tokens
from loradock.messages.prompts import IMAGE_BYTES_MAX, MultimodalPrompt

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
"""The formats that are read; no input reaches other decoders of the library."""

PIXELS_MAX: Final = 1 << 25
"""The most pixels of one image: 96 MiB decoded."""

SIDE_MAX: Final = 1 << 14
"""The most pixels of a side."""

PROMPT_PIXELS_MAX: Final = 1 << 27
"""The most pixels of a prompt's images together; reading uses up to 8 bytes per pixel."""

_DECODING_FAILURES: Final = (
    *MODEL_CODE_ERRORS,
    *(OSError, SyntaxError, EOFError, struct.error, zlib.error),
)
_MULTI_PICTURE_JPEG: Final = "MPO"
"""A JPEG with a thumbnail or second exposure after its picture, as telephones write it."""

_WHITE: Final = (255, 255, 255, 255)


def open_images(files: Sequence[bytes]) -> list[Image.Image]:
    """Decode a prompt's images by `open_image`; raises `Malformed`."""
    images, pixels = [], 0
    for number, data in enumerate(files, 1):
        images.append(open_image(data, number))
        pixels += images[-1].width * images[-1].height
        if pixels > PROMPT_PIXELS_MAX:
            raise Malformed(
                f"the first {number} of {len(files)} images have {pixels} pixels; at most "
                f"{PROMPT_PIXELS_MAX} of a prompt are read: send fewer or smaller images"
            )
    return images


def open_image(data: bytes, number: int = 1) -> Image.Image:
    """Decode the image in `data` as RGB, upright, with transparent parts on white.

    `number`: which image of the prompt it is, from 1, for the error's text. Raises
    `Malformed`.
    """
    if not 0 < len(data) <= IMAGE_BYTES_MAX:
        raise Malformed(f"image {number} has {len(data)} bytes; 1 to {IMAGE_BYTES_MAX} are read")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_head(image, number)
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise _too_large(number, "far too many") from error
    except _DECODING_FAILURES as error:
        # A decoder's message can contain bytes of the file, so only the error's type is reported.
        raise Malformed(
            f"image {number} can't be read ({type(error).__name__}); send a complete, undamaged "
            f"file of one of {', '.join(FORMATS)}"
        ) from error


def sample_png(size: tuple[int, int]) -> bytes:
    """Return a PNG in which no two regions look alike, for probes."""
    across, down = Image.linear_gradient("L").resize(size), Image.radial_gradient("L").resize(size)
    file = BytesIO()
    Image.merge("RGB", (across, down, Image.new("L", size, 90))).save(file, "PNG")
    return file.getvalue()


def _check_head(image: Image.Image, number: int) -> None:
    width, height = image.size
    if width * height > PIXELS_MAX or max(width, height) > SIDE_MAX:
        raise _too_large(number, f"{width} x {height}")
    if image.format != _MULTI_PICTURE_JPEG and getattr(image, "is_animated", False):
        raise Malformed(f"image {number} is animated; send a single frame")


def _too_large(number: int, found: str) -> Malformed:
    return Malformed(
        f"image {number} has {found} pixels; at most {PIXELS_MAX} in all and {SIDE_MAX} per side "
        "are read"
    )


def _as_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB.

    16-bit grey keeps its upper byte, where a plain conversion would clip.
    """
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    return image.convert("RGB")


_FILES: Final = ("processor_config.json", "preprocessor_config.json")
_VIDEO_PART: Final = "video_processor"
_TOKEN_TYPES: Final = ("token_type_ids", "mm_token_type_ids")

Processor = Any
"""A `transformers` processor; the library has no types for it."""


class ImagesRefused(Exception):  # noqa: N818 - named by what was found, as the engine's errors
    """The reason why a model is served for text alone."""


class ProcessedPrompt(NamedTuple):
    """A prompt as a model accepts it; `images` is None for text alone."""

    tokens: list[int]
    images: ImageInputs | None = None


def load_processor(directory: Path, config: Any) -> Processor:
    """Load the processor that a model was saved with; raise `ImagesRefused` if there is none.

    It decodes images with Pillow, so that every machine computes the same pixels. Its video part is
    left out, because constructing one requires torchvision.
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
        processor_class = _without_videos(_class_of(directory, config, tokenizer))
        saved, _ = processor_class.get_processor_dict(directory, local_files_only=True)
        return processor_class.from_args_and_dict(
            [parts[name] for name in processor_class.get_attributes()], saved
        )
    except (*MODEL_CODE_ERRORS, OSError, ImportError) as error:
        raise ImagesRefused(
            f"the model's own processor can't be made ({type(error).__name__}: {error})"
        ) from error


def _class_of(directory: Path, config: Any, tokenizer: Any) -> type[Any]:
    """Return the class that the saved files name, or the one registered for the model's config."""
    saved, _ = ProcessorMixin.get_processor_dict(directory, local_files_only=True)
    named = saved.get("processor_class") or tokenizer.init_kwargs.get("processor_class")
    processor_class = processor_class_from_name(named) if named else PROCESSOR_MAPPING[type(config)]
    if not (isinstance(processor_class, type) and issubclass(processor_class, ProcessorMixin)):
        raise TypeError(
            f"{processor_class} is no processor class here; some of them require torchvision"
        )
    return processor_class


class _OptionalVideoPart:
    """A mixin that goes before a processor's class and allows its video part to be None."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        """Check a part's class, and return the class that it must have."""
        if name == _VIDEO_PART and argument is None:
            return type(None)
        return super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


def _without_videos(processor_class: Any) -> Any:
    if _VIDEO_PART not in processor_class.get_attributes():
        return processor_class
    return type(processor_class.__name__, (_OptionalVideoPart, processor_class), {})


class ImagePromptReader:
    """Reads prompts with images for one model; safe to call from any thread.

    `accepts`: the argument names of the model's forward. Raises `ImagesRefused` if the processor
    does not fit the model.
    """

    def __init__(self, processor: Processor, model: ServedModel, accepts: frozenset[str]) -> None:
        if "pixel_values" not in accepts:
            raise ImagesRefused("the model's forward has no argument pixel_values")
        self.placeholder: str = getattr(processor, "image_token", None) or ""
        if not self.placeholder:
            raise ImagesRefused("the model's processor has no placeholder for an image")
        self._processor = processor
        self._processor_lock = Lock()
        self._model = model
        self._accepts = accepts
        # A stateless method of models that count positions in several axes.
        self._rope_index: Callable[..., Any] | None = getattr(
            model.model.base_model, "get_rope_index", None
        )

    def read(self, prompt: MultimodalPrompt, output_tokens: int = 0) -> ProcessedPrompt:
        """Process a prompt that must leave `output_tokens` of the context.

        Raises `Malformed`.
        """
        check_text(self._model, prompt.text)
        with self._processor_lock:
            self._check_placeholders(prompt)
        images = open_images(prompt.images)
        try:
            with self._processor_lock:
                outputs = self._processor(text=[prompt.text], images=images, return_tensors="pt")
            tokens = outputs.pop("input_ids")[0]
            check_tokens(self._model, tokens.tolist(), output_tokens)
            return ProcessedPrompt(tokens.tolist(), self._image_inputs(tokens, outputs))
        except MODEL_CODE_ERRORS as error:
            raise Malformed(
                f"the model's processor can't read these images in this text: {str(error)[:300]}"
            ) from error

    def is_media_token(self, token: int) -> bool:
        """Return whether a token stands for an image, a video or a sound."""
        return token in self._model.media_tokens

    def _check_placeholders(self, prompt: MultimodalPrompt) -> None:
        """Check for one placeholder per image, and no other token that stands for one."""
        found, images = prompt.text.count(self.placeholder), len(prompt.images)
        if found != images:
            raise Malformed(
                f"the text has {self.placeholder!r} {found} times and the prompt {images} images; "
                "write it once for each image, in their order"
            )
        tokenizer = self._processor.tokenizer
        image_token = tokenizer.convert_tokens_to_ids(self.placeholder)
        tokens = tokenizer(prompt.text)["input_ids"]
        stray = self._model.media_tokens.intersection(tokens) - {image_token}
        if stray or tokens.count(image_token) != images:
            name = tokenizer.convert_ids_to_tokens(min(stray, default=image_token))
            raise Malformed(
                f"{name!r} in the text stands for an image, a video or a sound that the prompt "
                f"does not contain; the placeholder of an image is {self.placeholder!r}"
            )

    def _image_inputs(self, tokens: Tensor, outputs: Mapping[str, Any]) -> ImageInputs:
        """Convert the processor's other tensors to arguments of the model's forward."""
        types = {name: outputs[name] for name in _TOKEN_TYPES if name in outputs}
        tensors = {
            name: self._in_model_dtype(value)
            for name, value in outputs.items()
            if name not in (*_TOKEN_TYPES, "attention_mask")
        }
        unknown = set(tensors).difference(self._accepts)
        if unknown:
            raise ValueError(f"the model's forward has no argument {', '.join(sorted(unknown))}")
        positions, offset = self._positions({"input_ids": tokens[None], **types, **tensors})
        token_types = {name: value[0] for name, value in types.items() if name in self._accepts}
        return ImageInputs(tensors, token_types, positions, offset)

    def _in_model_dtype(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"the processor returned a {type(value).__name__} instead of a tensor")
        return value.to(self._model.model.dtype) if value.is_floating_point() else value

    def _positions(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor | None, int]:
        if self._rope_index is None:
            return None, 0
        parameters = inspect.signature(self._rope_index).parameters
        arguments = {name: value for name, value in inputs.items() if name in parameters}
        with torch.inference_mode():
            positions, deltas = self._rope_index(**arguments)
        return positions[:, 0], int(deltas)


_IMAGE_SIZES: Final = ((64, 48), (48, 120))
"""The sizes of the probe's images; they differ so that rows differ where sizes matter."""

_TEXT: Final = "What is this?"


def probe_images(forward: Forward, make_cache: MakeCache, reader: ImagePromptReader) -> None:
    """Raise `ImagesRefused` unless rows with images answer in a batch as they do alone."""
    try:
        rows = list(_probe_rows(reader))
        _check_rows(forward, make_cache, rows)
    except (*MODEL_CODE_ERRORS, Malformed, ModelRefused) as error:
        raise ImagesRefused(
            f"the model did not pass the probe with images: {type(error).__name__}: {error}"
        ) from error


def _check_rows(forward: Forward, make_cache: MakeCache, rows: list[ProcessedPrompt]) -> None:
    next_token = rows[0].tokens[-1]
    prompts, images = [row.tokens for row in rows], [row.images for row in rows]
    together = prefill_and_decode(forward, prompts, [next_token], make_cache, images)
    for index, row in enumerate(rows):
        alone = prefill_and_decode(forward, [row.tokens], [next_token], make_cache, [row.images])
        check_same(together[:, index], alone[:, 0])


def _probe_rows(reader: ImagePromptReader) -> Iterator[ProcessedPrompt]:
    """Yield a row with an image, one of text, and one with another image."""
    first, second = (
        MultimodalPrompt(reader.placeholder + _TEXT, (sample_png(size),)) for size in _IMAGE_SIZES
    )
    with_image = reader.read(first)
    yield with_image
    yield ProcessedPrompt([t for t in with_image.tokens if not reader.is_media_token(t)])
    yield reader.read(second)
