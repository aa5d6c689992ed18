"""A client's image file as pixels that an image processor may have.

What it is: the checks before and after decoding, and the one colour space that models were trained
on. What it is not: resizing or normalising; that is the model's own processor's. One rule: size and
format are known from the file's head, and refused there, before anything is decoded.
"""

import struct
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Final

from PIL import Image, ImageOps

from engine.errors import FOREIGN_FAILURES, RequestRefused
from messages.requests import IMAGE_BYTES_MAX

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
"""What is read; other decoders of the library are not reachable by any bytes."""

PIXELS_MAX: Final = 1 << 25
"""The most pixels of one image: 96 MiB decoded."""

SIDE_MAX: Final = 1 << 14
"""The most pixels of a side."""

PROMPT_PIXELS_MAX: Final = 1 << 27
"""The most pixels of a prompt's images together; reading them takes up to 8 bytes for each."""

_DECODING_FAILURES: Final = (
    *FOREIGN_FAILURES,
    *(OSError, SyntaxError, EOFError, struct.error, zlib.error),
)
_PICTURE_WITH_EXTRAS: Final = "MPO"
"""A JPEG that brings a thumbnail or a second exposure behind its picture, as telephones make it."""

_WHITE: Final = (255, 255, 255, 255)


def open_images(files: Sequence[bytes]) -> list[Image.Image]:
    """A prompt's images, each as `open_image` has it; raises `RequestRefused`."""
    images, pixels = [], 0
    for number, data in enumerate(files, 1):
        images.append(open_image(data, number))
        pixels += images[-1].width * images[-1].height
        if pixels > PROMPT_PIXELS_MAX:
            raise RequestRefused(
                f"the first {number} of {len(files)} images have {pixels} pixels; at most "
                f"{PROMPT_PIXELS_MAX} of a prompt are read: send fewer, or smaller ones"
            )
    return images


def open_image(data: bytes, number: int = 1) -> Image.Image:
    """The image in `data`, upright, as RGB; what is transparent lies on white.

    `number`: which of a prompt's images it is, counted from 1, for the error's text. Raises
    `RequestRefused`.
    """
    if not 0 < len(data) <= IMAGE_BYTES_MAX:
        raise RequestRefused(
            f"image {number} has {len(data)} bytes; 1 to {IMAGE_BYTES_MAX} are read"
        )
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_head(image, number)
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise _too_large(number, "far too many") from error
    except _DECODING_FAILURES as error:
        # A decoder's words may hold the file's bytes; the kind of failure says enough.
        raise RequestRefused(
            f"image {number} can't be read ({type(error).__name__}); a whole, sound file of one of "
            f"{', '.join(FORMATS)} can"
        ) from error


def sample_png(size: tuple[int, int]) -> bytes:
    """A picture in which no two places look alike, to try a model with."""
    across, down = Image.linear_gradient("L").resize(size), Image.radial_gradient("L").resize(size)
    file = BytesIO()
    Image.merge("RGB", (across, down, Image.new("L", size, 90))).save(file, "PNG")
    return file.getvalue()


def _check_head(image: Image.Image, number: int) -> None:
    width, height = image.size
    if width * height > PIXELS_MAX or max(width, height) > SIDE_MAX:
        raise _too_large(number, f"{width} x {height}")
    if image.format != _PICTURE_WITH_EXTRAS and getattr(image, "is_animated", False):
        raise RequestRefused(f"image {number} is animated; send the one frame that is meant")


def _too_large(number: int, found: str) -> RequestRefused:
    return RequestRefused(
        f"image {number} has {found} pixels; at most {PIXELS_MAX} in all and {SIDE_MAX} a side are "
        "read"
    )


def _as_rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB; 16-bit grey keeps its upper byte, which a plain conversion would clip."""
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    return image.convert("RGB")
