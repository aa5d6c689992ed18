"""Whether a model can be served with images: asked of the model itself, by running it.

What it is: a few prompts with images of our own making, when the engine starts. What it is not: a
judge of the model; text alone has passed `engine.probe` by then. One rule: a model that fails here
is served for text alone, and every prompt with images is told why.
"""

from collections.abc import Iterator
from typing import Final

from engine.errors import FOREIGN_FAILURES, ModelRefused, RequestRefused
from engine.models.image_processor import ImageReader, ImagesRefused, Reading
from engine.models.probe import Forward, compare, two_steps
from engine.models.vision.decoding import sample_png
from messages.requests import IllustratedPrompt

SIZES: Final = ((64, 48), (48, 120))
"""Of the images that are tried: unlike, so that where sizes matter, rows are unlike too."""

_WORDS: Final = "What is this?"


def try_images(forward: Forward, reader: ImageReader) -> None:
    """Raise `ImagesRefused` unless rows with images and rows of text answer together as alone."""
    try:
        rows = list(_rows(reader))
        _compare(forward, rows)
    except (*FOREIGN_FAILURES, RequestRefused, ModelRefused) as error:
        raise ImagesRefused(
            f"the model did not pass a trial with images: {type(error).__name__}: {error}"
        ) from error


def _compare(forward: Forward, rows: list[Reading]) -> None:
    next_token = rows[0].tokens[-1]
    together = two_steps(
        forward, [row.tokens for row in rows], next_token, [row.media for row in rows]
    )
    for place, row in enumerate(rows):
        alone = two_steps(forward, [row.tokens], next_token, [row.media])
        compare(together[:, place], alone[:, 0])


def _rows(reader: ImageReader) -> Iterator[Reading]:
    """A row with an image, one of text, and one with another image."""
    first, second = (
        IllustratedPrompt(reader.placeholder + _WORDS, (sample_png(s),)) for s in SIZES
    )
    yield (one := reader.read(first))
    yield Reading([token for token in one.tokens if not reader.is_media(token)])
    yield reader.read(second)
