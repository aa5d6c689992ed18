"""An image file becomes upright RGB pixels, or is refused before it is decoded."""

import struct
import zlib
from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from loradock.engine.errors import Malformed
from loradock.engine.models import image_processor
from loradock.engine.models.image_processor import (
    FORMATS,
    PIXELS_MAX,
    SIDE_MAX,
    open_image,
    open_images,
)
from loradock.messages.prompts import IMAGE_BYTES_MAX
from tests.support.models.image_examples import picture, png

NOISE = picture(7, 5, 3)
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "GIF": {}}


def saved(image: Image.Image, kind: str, **fields: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **fields)
    return file.getvalue()


WHOLE = [saved(picture(23, 17, 1), kind) for kind in FORMATS]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int, *more: bytes, data: bytes = b"") -> bytes:
    """Return a PNG whose header specifies this size, regardless of its data."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    end = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + end


@pytest.mark.parametrize("kind", LOSSLESS)
def test_every_pixel_is_as_saved(kind: str) -> None:
    found = open_image(saved(NOISE, kind, **LOSSLESS[kind]))
    assert found.mode == "RGB"
    assert found.tobytes() == NOISE.tobytes()


def test_a_jpeg_is_nearly_as_saved() -> None:
    grey = Image.new("RGB", (9, 8), (90, 120, 30))
    found = open_image(saved(grey, "JPEG", quality=95))
    assert found.size == (9, 8)
    assert all(abs(a - b) < 4 for a, b in zip(found.getpixel((4, 4)), (90, 120, 30), strict=True))


MODES = {
    "1": ("PNG", 1, (255, 255, 255)),
    "L": ("PNG", 40, (40, 40, 40)),
    "LA": ("PNG", (0, 51), (204, 204, 204)),
    "RGBA": ("PNG", (0, 0, 100, 0), (255, 255, 255)),
    "CMYK": ("JPEG", (0, 0, 0, 255), (0, 0, 0)),
    "I;16": ("PNG", 40 * 256 + 255, (40, 40, 40)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb_on_white(mode: str) -> None:
    kind, colour, expected = MODES[mode]
    found = open_image(saved(Image.new(mode, (3, 2), colour), kind))
    assert found.mode == "RGB"
    assert found.getpixel((1, 1)) == expected


def test_a_palette_with_a_transparent_colour_becomes_rgb_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    found = open_image(saved(image, "PNG", transparency=0))
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (40, 50, 60)]


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    found = open_image(saved(NOISE, "PNG", exif=exif))
    assert found.size == (5, 7)
    assert found.tobytes() == NOISE.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_a_photograph_with_a_second_exposure_is_its_first() -> None:
    two = saved(Image.new("RGB", (8, 8), (200, 0, 0)), "MPO", save_all=True, append_images=[NOISE])
    assert open_image(two).size == (8, 8)


REFUSED = {
    "nothing": (b"", "0 bytes"),
    "too many bytes": (bytes(IMAGE_BYTES_MAX + 1), str(IMAGE_BYTES_MAX)),
    "no image": (b"what is this?", "can't be read"),
    "another format": (saved(NOISE, "BMP"), "JPEG, PNG, WEBP, GIF"),
    "a format with many decoders": (saved(NOISE, "TIFF"), "can't be read"),
    "a program for a printer": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "can't be"),
    "markup": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "can't be read"),
    "a wide bomb": (png_of(60_000, 60_000), "far too many pixels"),
    "the greatest bomb": (png_of(2**31 - 1, 2**31 - 1), "pixels|can't be read"),
    "a long bomb": (png_of(SIDE_MAX + 1, 1), f"{SIDE_MAX} per side"),
    "just too many pixels": (png_of(SIDE_MAX, PIXELS_MAX // SIDE_MAX + 1), str(PIXELS_MAX)),
    "no height": (png_of(5, 0), "can't be read|pixels"),
    "nothing after the header": (png_of(5, 5), "can't be read"),
    "a bomb of text": (
        png_of(1, 1, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20)))),
        "can't be read",
    ),
    "half a file": (png(picture(64, 64))[:4000], "can't be read"),
    "half a photograph": (saved(picture(64, 64), "JPEG")[:1500], "can't be read"),
    "animated": (saved(NOISE, "GIF", save_all=True, append_images=[picture(7, 5)]), "animated"),
    "animated png": (saved(NOISE, "PNG", save_all=True, append_images=[picture(7, 5)]), "animated"),
    "animated webp": (
        saved(NOISE, "WEBP", save_all=True, append_images=[picture(7, 5)]),
        "animated",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_can_not_be_read_is_refused_with_the_reason(case: str) -> None:
    data, words = REFUSED[case]
    with pytest.raises(Malformed, match=f"image 3 .*({words})"):
        open_image(data, number=3)


def test_nothing_is_decoded_before_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_processor, "PIXELS_MAX", 34)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    for whole in WHOLE:
        with pytest.raises(Malformed, match="23 x 17 pixels; at most 34"):
            open_image(whole)


def test_a_prompts_images_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [png(picture(4, 5, seed)) for seed in range(3)]
    monkeypatch.setattr(image_processor, "PROMPT_PIXELS_MAX", 60)
    assert [image.size for image in open_images(files)] == [(4, 5)] * 3
    monkeypatch.setattr(image_processor, "PROMPT_PIXELS_MAX", 59)
    with pytest.raises(Malformed, match="first 3 of 3 images have 60 pixels; at most 59"):
        open_images(files)


@settings(max_examples=300)
@given(st.sampled_from(WHOLE), st.data())
def test_a_damaged_file_is_an_image_or_refused_and_nothing_else(
    whole: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = open_image(bytes(damaged))
    except Malformed:
        return
    assert found.mode == "RGB"
    assert torch.tensor(found.size).prod() <= PIXELS_MAX
