"""Decoding of a client's image file to pixels for a model's image processor.

Format and size are checked from the file's header, before anything is decoded. Every image becomes
RGB, the colour space that models were trained on.
"""

import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Final

from PIL import Image, ImageOps

from loradock.engine.errors import MODEL_CODE_ERRORS, Malformed
from loradock.messages.prompts import IMAGE_BYTES_MAX

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
                f"{PROMPT_PIXELS_MAX} of a prompt are read: send fewer, or smaller ones"
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
        # A decoder's message may contain bytes of the file, so only the error's type is reported.
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
