"""A probe of whether a model can be served with images: a batch of prompts, run at start.

`engine/models/trials/probe.py` has verified batches of text by then. A model that fails here is
served for text alone, and every prompt with images is refused with the reason.
"""

from collections.abc import Iterator
from typing import Final

from loradock.engine.errors import MODEL_CODE_ERRORS, ModelRefused, RequestRefused
from loradock.engine.models.image_processor import ImagePromptReader, ImagesRefused, ProcessedPrompt
from loradock.engine.models.trials.comparison import check_same
from loradock.engine.models.trials.probe import Forward, MakeCache, prefill_and_decode
from loradock.engine.models.vision.decoding import sample_png
from loradock.messages.prompts import IllustratedPrompt

_IMAGE_SIZES: Final = ((64, 48), (48, 120))
"""The sizes of the probe's images; they differ so that rows differ where sizes matter."""

_TEXT: Final = "What is this?"


def probe_images(forward: Forward, make_cache: MakeCache, reader: ImagePromptReader) -> None:
    """Raise `ImagesRefused` unless rows with images answer in a batch as they do alone."""
    try:
        rows = list(_probe_rows(reader))
        _check_rows(forward, make_cache, rows)
    except (*MODEL_CODE_ERRORS, RequestRefused, ModelRefused) as error:
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
        IllustratedPrompt(reader.placeholder + _TEXT, (sample_png(size),)) for size in _IMAGE_SIZES
    )
    with_image = reader.read(first)
    yield with_image
    yield ProcessedPrompt([t for t in with_image.tokens if not reader.is_media_token(t)])
    yield reader.read(second)
