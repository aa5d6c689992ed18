"""Images as a part of prompts, given as files or as bytes.

A file is read no further than the bounds of a request allow; a longer one is refused.
Images are not decoded here; the engine refuses files of other formats.
"""

import os
from collections.abc import Iterable
from typing import Final

from loradock.client.errors import Malformed
from loradock.messages.prompts import (
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    IllustratedPrompt,
    Image,
    Prompt,
    TextPrompt,
)

ImageSource = bytes | str | os.PathLike[str]
"""An image file's bytes, or its path on this machine."""

_SOURCES: Final = (bytes, str, os.PathLike)


def with_images(prompt: TextPrompt, images: ImageSource | Iterable[ImageSource]) -> Prompt:
    """Return the prompt with its images, or the prompt itself if there are none.

    Raises `Malformed` for what a request can't hold, and `OSError` for a file that can't be read.
    """
    sources = (images,) if isinstance(images, _SOURCES) else tuple(images)
    if not sources:
        return prompt
    if not isinstance(prompt, str):
        raise Malformed(
            "images need a prompt of text, which has a placeholder for each of them; token ids "
            "were found"
        )
    if len(sources) > IMAGES_MAX:
        raise Malformed(f"{len(sources)} images were found; a prompt may have {IMAGES_MAX}")
    read, size = [], 0
    for number, source in enumerate(sources, 1):
        read.append(_image(f"image {number}", source))
        size += len(read[-1])
        if size > IMAGES_BYTES_MAX:
            raise Malformed(
                f"the first {number} images have {size} bytes together; those of a prompt may "
                f"have {IMAGES_BYTES_MAX}"
            )
    return IllustratedPrompt(prompt, tuple(read))


def _image(name: str, source: ImageSource) -> Image:
    if not isinstance(source, _SOURCES):
        raise Malformed(f"{name} is a {type(source).__name__}; bytes or a path are allowed")
    if not isinstance(source, bytes):
        name = f"{name}, {os.fspath(source)!r},"
        with open(source, "rb") as file:
            source = file.read(IMAGE_BYTES_MAX + 1)
    if not source:
        raise Malformed(f"{name} is empty")
    if len(source) > IMAGE_BYTES_MAX:
        raise Malformed(f"{name} is longer than the allowed {IMAGE_BYTES_MAX} bytes")
    return source
