"""Keys and values of the running rows, as one left-padded batch.

A row's last token is in the last column, so its length specifies which columns are its own. Rows
share nothing: two rows with one prompt under two adapters have separate keys and values.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.errors import ModelRefused
from loradock.engine.layout import next_power_of_two
from loradock.engine.models.kv_cache_layer import GrowableKVLayer
from loradock.engine.models.library.caches import Cache, DummyLayer

STATIC_COLUMNS_MIN: Final = 64
"""The fewest columns of a static step: smaller ones save little and need their own graphs."""


def left_padding_mask(lengths: Tensor, width: int) -> Tensor:
    """Return each row's own columns: [rows, width] int64, 1 in the last `lengths[row]` columns."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= width - lengths[:, None]).long()


def static_mask(lengths: Tensor, column: Tensor, columns: int) -> Tensor:
    """Return each row's own columns where all rows end at `column`: [rows, columns] int64."""
    index = torch.arange(columns, device=lengths.device)
    return ((index <= column) & (index > column - lengths[:, None])).long()


class StepShape(NamedTuple):
    """The sizes of a static step: rows, columns, and the column that it writes."""

    rows: int
    columns: int
    column: int


class BatchKVCache:
    """The keys and values of a batch, and the number of tokens of each row in them.

    In `cache`, every layer's keys and values are [rows, heads, width, head_dim], with the same
    width in all layers. The last `lengths[row]` columns are the row's own; the others are never
    read. `offsets`: the position of a row's next token minus its length. It is not 0 where images
    advance positions by a number other than their tokens. `prompt_lengths`: see `RowCache`.
    """

    def __init__(
        self, lengths: Sequence[int], offsets: Sequence[int] = (), *, keeps_capacity: bool = False
    ) -> None:
        """Make an empty cache for the first forward of rows with these numbers of tokens.

        `keeps_capacity`: buffers stay in place when rows leave, for static steps.
        """
        self.cache = Cache(layer_class_to_replicate=GrowableKVLayer)
        self.lengths = list(lengths)
        self.prompt_lengths = list(lengths)
        self.offsets = list(offsets) or [0] * len(self.lengths)
        self._keeps_capacity = keeps_capacity

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        pairs = zip(self.lengths, self.offsets, strict=True)
        return [length + offset for length, offset in pairs]

    @property
    def layers(self) -> list[GrowableKVLayer]:
        """The layers that hold keys and values; one that reads another layer's cache holds none."""
        return [layer for layer in self.cache.layers if layer.is_initialized]

    @property
    def width(self) -> int:
        """The number of columns of every layer: at least the tokens of the longest row."""
        return next((layer.width for layer in self.layers), 0)

    @property
    def buffers_key(self) -> tuple[object, ...]:
        """The identity of all layers' buffers; it differs once any buffer was reallocated."""
        return tuple(layer.buffers_key for layer in self.layers)

    @property
    def size_bytes(self) -> int:
        """The bytes of all layers' buffers."""
        return sum(layer.size_bytes for layer in self.layers)

    def grow(self, tokens: int) -> None:
        """Count `tokens` new tokens of every row, which the next forward writes."""
        self.lengths = [length + tokens for length in self.lengths]

    def check_columns(self, width: int) -> None:
        """Raise `ModelRefused` unless every layer has keys and values of all rows and columns."""
        rows = len(self)
        for number, layer in enumerate(self.layers):
            shape = () if layer.keys is None else tuple(layer.keys.shape)
            if len(shape) != 4 or shape[0] != rows or shape[2] != width:
                raise ModelRefused(
                    f"layer {number} caches {shape}; only keys and values of "
                    f"[rows, heads, tokens, head_dim] can be batched, here ({rows}, ?, {width}, ?)"
                )
        if not self.layers:
            raise ModelRefused("the model fills no key/value cache; generation would start over")

    def join(self, other: "BatchKVCache") -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        if self.layers:
            for layer, added in zip(self.layers, other.layers, strict=True):
                layer.join(added)
        else:
            self.cache = other.cache
        self.lengths += other.lengths
        self.offsets += other.offsets
        self.prompt_lengths += other.prompt_lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the columns that are then padding in every row."""
        is_whole = list(rows) == list(range(len(self)))
        self.lengths = [self.lengths[row] for row in rows]
        self.offsets = [self.offsets[row] for row in rows]
        self.prompt_lengths = [self.prompt_lengths[row] for row in rows]
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
            if not self._keeps_capacity:
                layer.shrink_to_fit()

    def take(self, row: int) -> "BatchKVCache":
        """Remove a row and return it in a cache of its own, without a fixed capacity."""
        taken = BatchKVCache([self.lengths[row]], [self.offsets[row]])
        taken.prompt_lengths = [self.prompt_lengths[row]]
        taken.cache.layers = [layer.copy_of(row) for layer in self.cache.layers]
        taken.keep([0])
        self.keep([other for other in range(len(self)) if other != row])
        return taken

    def reserve(self, columns_min: int = STATIC_COLUMNS_MIN) -> StepShape:
        """Reserve buffers for a static step, in powers of two, and return the step's sizes."""
        rows = next_power_of_two(len(self))
        columns = next_power_of_two(max(columns_min, self.width + 1))
        for layer in self.layers:
            layer.reserve(rows, columns)
        return StepShape(rows, columns, self.layers[0].last)

    def static_cache(self, rows: int, columns: int, column: Tensor) -> Cache:
        """Return the cache that a static step reads and writes; column: [1] int64 on the device."""
        return Cache(
            layers=[
                layer.static_layer(rows, columns, column) if layer.is_initialized else DummyLayer()
                for layer in self.cache.layers
            ]
        )

    def advance(self) -> None:
        """Count the column that a static step has written."""
        for layer in self.layers:
            layer.last += 1

    def _clear(self) -> None:
        if self._keeps_capacity:
            for layer in self.layers:
                layer.clear()
        else:
            self.cache = Cache(layer_class_to_replicate=GrowableKVLayer)
