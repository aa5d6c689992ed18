"""The keys and values of the running rows, one left-padded batch.

What it is: joining, dropping and cropping rows of a cache that `transformers` fills. What it is
not: shared between rows; the same prompt under two adapters has two of everything. One rule: a
row's last token is in the last column, so its true length tells which columns are its own.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer

from engine.layout import power_of_two
from engine.models.kv_cache_layer import RoomyLayer

FIXED_COLUMNS_MIN: Final = 64
"""The fewest columns of a step over fixed places; fewer would be other graphs for little."""


def left_padding_mask(lengths: Tensor, width: int) -> Tensor:
    """Which columns are a row's own: [rows, width] int64, 1 in the last `lengths[row]` columns."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= width - lengths[:, None]).long()


def fixed_mask(lengths: Tensor, column: Tensor, columns: int) -> Tensor:
    """Which columns are a row's own where all rows end at `column`: [rows, columns] int64."""
    places = torch.arange(columns, device=lengths.device)
    return ((places <= column) & (places > column - lengths[:, None])).long()


class Places(NamedTuple):
    """The sizes of a step over fixed places: rows, columns, and the column that it writes."""

    rows: int
    columns: int
    column: int


class RowCache:
    """A batch's cache and how many tokens of each row are in it.

    In `cache`, every layer's keys and values are [rows, heads, width, head_dim] with one width for
    all layers; the last `lengths[row]` columns are the row's own, the others are never read.
    `offsets`: how much further a row's next position is than its length, where images count for
    other than their tokens.
    """

    def __init__(
        self, lengths: Sequence[int], offsets: Sequence[int] = (), *, keeps_room: bool = False
    ) -> None:
        """An empty cache for a first forward of rows that have `lengths` tokens.

        `keeps_room`: room stays where it is when rows leave, for steps over fixed places.
        """
        self.cache = Cache(layer_class_to_replicate=RoomyLayer)
        self.lengths = list(lengths)
        self.offsets = list(offsets) or [0] * len(self.lengths)
        self._keeps_room = keeps_room

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [length + more for length, more in zip(self.lengths, self.offsets, strict=True)]

    @property
    def layers(self) -> list[RoomyLayer]:
        """The layers that hold something; a layer that reads another's cache holds nothing."""
        return [layer for layer in self.cache.layers if layer.is_initialized]

    @property
    def width(self) -> int:
        """The columns of every layer: as many as the longest row's tokens, or more."""
        return next((layer.width for layer in self.layers), 0)

    @property
    def place(self) -> tuple[object, ...]:
        """What stands for the buffers of all layers; unequal once any is another."""
        return tuple(layer.place for layer in self.layers)

    def grow(self, tokens: int) -> None:
        """Count the tokens that the next forward brings to every row."""
        self.lengths = [length + tokens for length in self.lengths]

    def join(self, other: "RowCache") -> None:
        """Take the rows of `other` after the own ones; `other` is not to be used any more."""
        if self.layers:
            for mine, theirs in zip(self.layers, other.layers, strict=True):
                mine.join(theirs)
        else:
            self.cache = other.cache
        self.lengths += other.lengths
        self.offsets += other.offsets

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the columns that are padding in all."""
        is_whole = list(rows) == list(range(len(self)))
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        if not rows:
            self._clear()
            return
        padding = self.width - max(self.lengths)
        if is_whole and padding == 0:
            return
        staying = next((at for at, row in enumerate(rows) if at != row), len(rows))
        for layer in self.layers:
            moved = torch.tensor(rows[staying:], dtype=torch.int64, device=layer.device)
            layer.keep(staying, moved, padding)
            if not self._keeps_room:
                layer.give_back()

    def provide(self, columns_min: int = FIXED_COLUMNS_MIN) -> Places:
        """Make room for a step over fixed places, whose sizes are powers of two, and say which."""
        rows = power_of_two(len(self))
        columns = power_of_two(max(columns_min, self.width + 1))
        for layer in self.layers:
            layer.provide(rows, columns)
        return Places(rows, columns, self.layers[0].last)

    def fixed(self, rows: int, columns: int, column: Tensor) -> Cache:
        """What a step over fixed places reads and writes; column: [1] int64 on the device."""
        return Cache(
            layers=[
                layer.fixed(rows, columns, column) if layer.is_initialized else DummyLayer()
                for layer in self.cache.layers
            ]
        )

    def advance(self) -> None:
        """Count the column that a step over fixed places has written."""
        for layer in self.layers:
            layer.last += 1

    def _clear(self) -> None:
        if self._keeps_room:
            for layer in self.layers:
                layer.clear()
        else:
            self.cache = Cache(layer_class_to_replicate=RoomyLayer)
