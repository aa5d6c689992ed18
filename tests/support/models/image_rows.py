"""Rows of a batch of texts and images, as tensors, for tiny models of every kind.

What it is: images of unlike sizes, and what each kind's forward takes of some rows together. What
it is not: a processor; tensors are made by hand. One rule: all rows have as many tokens, so that
nothing is padded but tiles, and a row alone is the same as in a batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.models.image_text_examples import IMAGE_TOKEN

WIDTH = 24
TOKENS_OF_SQUARE = 4
TILED = {"idefics3": 1, "smolvlm": 1, "idefics2": 4}
"""The kinds whose images come as tiles, and the tokens of a tile."""
GRIDS = ((2, 2), (2, 6), (4, 4))
"""Height and width of Qwen's images, in patches; four patches become a token."""


class Row(NamedTuple):
    """An adapter (0: the base) and the images of one prompt, by number."""

    adapter: int
    images: tuple[int, ...] = ()


def inputs(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What the model's forward takes of these rows."""
    tokens = torch.stack([_tokens(kind, row) for row in rows])
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    types = (tokens == IMAGE_TOKEN).long()
    if kind == "gemma3":
        given["token_type_ids"] = types
    if kind.startswith("qwen"):
        given["mm_token_type_ids"] = types
    return given | images(kind, rows)


def images(kind: str, rows: Sequence[Row]) -> dict[str, Tensor]:
    """Their images alone, in their order; empty where there are none."""
    every = [number for row in rows for number in row.images]
    if not every:
        return {}
    if kind.startswith("qwen"):
        grids = torch.tensor([(1, *GRIDS[number]) for number in every])
        pixels = [_noise(n, int(grid.prod()), 96) for n, grid in zip(every, grids, strict=True)]
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}
    if kind in TILED:
        return {"pixel_values": _tiles([row for row in rows if row.images])}
    return {"pixel_values": torch.stack([_noise(number, 3, 8, 8) for number in every])}


def entries(kind: str, rows: Sequence[Row]) -> list[int]:
    """The adapter of every image, as the model is given them: tiles by row, others one by one."""
    if kind in TILED:
        return [row.adapter for row in rows if row.images]
    return [row.adapter for row in rows for _ in row.images]


def _tiles(rows: Sequence[Row]) -> Tensor:
    """Image n has n + 1 tiles; a row has all of its images', then zeros."""
    tiles = [torch.cat([_noise(n, n + 1, 3, 8, 8) for n in row.images]) for row in rows]
    longest = max(map(len, tiles))
    return torch.stack(
        [torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])]) for own in tiles]
    )


def _tokens(kind: str, row: Row) -> Tensor:
    tokens = [7 + sum(row.images)]
    for number in row.images:
        tokens += [IMAGE_TOKEN] * _image_tokens(kind, number) + [11 + number]
    rest = WIDTH - len(tokens)
    return torch.tensor(tokens + [(13 * place + 5) % 80 for place in range(rest)])


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
