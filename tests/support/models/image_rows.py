"""Rows of texts and images as hand-made tensors, for tiny models of every type.

Images have different sizes. All rows have the same number of tokens, so that only tiles are padded,
and a row alone has the same tensors as in a batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.models.image_text_examples import IMAGE_TOKEN

WIDTH = 24
TOKENS_OF_SQUARE = 4
TILED = {"idefics3": 1, "smolvlm": 1, "idefics2": 4}
"""Model types with tiled images, and the tokens per tile."""
GRIDS = ((2, 2), (2, 6), (4, 4))
"""Height and width of Qwen's images, in patches; four patches become one token."""


class ImageRow(NamedTuple):
    """An adapter id (0: the base model) and the images of one prompt, by number."""

    adapter: int
    images: tuple[int, ...] = ()


def inputs(kind: str, rows: Sequence[ImageRow]) -> dict[str, Any]:
    """Return the arguments of the model's forward for these rows."""
    tokens = torch.stack([_tokens(kind, row) for row in rows])
    arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    types = (tokens == IMAGE_TOKEN).long()
    if kind == "gemma3":
        arguments["token_type_ids"] = types
    if kind.startswith("qwen"):
        arguments["mm_token_type_ids"] = types
    return arguments | images(kind, rows)


def images(kind: str, rows: Sequence[ImageRow]) -> dict[str, Tensor]:
    """Return the image arguments alone, in order; empty if the rows have no images."""
    numbers = [number for row in rows for number in row.images]
    if not numbers:
        return {}
    if kind.startswith("qwen"):
        grids = torch.tensor([(1, *GRIDS[number]) for number in numbers])
        pixels = [_noise(n, int(grid.prod()), 96) for n, grid in zip(numbers, grids, strict=True)]
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}
    if kind in TILED:
        return {"pixel_values": _tiles([row for row in rows if row.images])}
    return {"pixel_values": torch.stack([_noise(number, 3, 8, 8) for number in numbers])}


def entries(kind: str, rows: Sequence[ImageRow]) -> list[int]:
    """Return the adapter id per entry of the image tensors: per row for tiles, else per image."""
    if kind in TILED:
        return [row.adapter for row in rows if row.images]
    return [row.adapter for row in rows for _ in row.images]


def _tiles(rows: Sequence[ImageRow]) -> Tensor:
    """Return [rows, tiles, ...]: image n has n + 1 tiles; rows are padded with zeros."""
    tiles = [torch.cat([_noise(n, n + 1, 3, 8, 8) for n in row.images]) for row in rows]
    longest = max(map(len, tiles))
    return torch.stack(
        [torch.cat([row, row.new_zeros(longest - len(row), *row.shape[1:])]) for row in tiles]
    )


def _tokens(kind: str, row: ImageRow) -> Tensor:
    tokens = [7 + sum(row.images)]
    for number in row.images:
        tokens += [IMAGE_TOKEN] * _image_tokens(kind, number) + [11 + number]
    rest = WIDTH - len(tokens)
    return torch.tensor(tokens + [(13 * index + 5) % 80 for index in range(rest)])


def _image_tokens(kind: str, number: int) -> int:
    if kind in TILED:
        return TILED[kind] * (number + 1)
    if kind == "internvl":
        return 1
    if kind.startswith("qwen"):
        return GRIDS[number][0] * GRIDS[number][1] // 4
    return TOKENS_OF_SQUARE


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
