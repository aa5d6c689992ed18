"""Keys and values of the running rows, as one left-padded batch.

A row's last token is in the last column, so its length specifies which columns are its own. Rows
share nothing: two rows with one prompt under two adapters have separate keys and values.

A layer's buffers are larger than what is used. A column that is not a row's own contains what the
same row had there earlier, or zeros, and never data of another row. These columns have weight 0 in
attention, but weight 0 does not cancel a NaN.
"""

from collections.abc import Sequence
from typing import Final, Self

import torch
from torch import Tensor

from loradock.engine.errors import ModelRefused
from loradock.engine.layout import next_power_of_two
from loradock.engine.models.library.names import Cache, CacheLayerMixin
from loradock.engine.models.row_cache import RowCache

IDLE_CAPACITY_MAX: Final = 4
"""Buffers are kept while they are at most this many times as large as the rows need."""


class GrowableKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of `rows` rows, of which the columns `first` to `last` (exclusive) are used.

    Capacity grows to powers of two, in rows and in columns, so that most changes move nothing.
    """

    is_sliding = False

    def __init__(self) -> None:
        # The base class's constructor assigns keys and values, which are properties here.
        self.is_initialized = False
        self.rows = self.first = self.last = 0
        self._buffers: tuple[Tensor, ...] = ()

    @property
    def keys(self) -> Tensor | None:
        """The used keys, [rows, heads, width, head_dim]: a view, valid until the next change."""
        return self._used(self._buffers[0]) if self._buffers else None

    @property
    def values(self) -> Tensor | None:
        """The used values, as `keys`."""
        return self._used(self._buffers[1]) if self._buffers else None

    @property
    def width(self) -> int:
        """The number of used columns."""
        return self.last - self.first

    @property
    def capacity(self) -> tuple[int, int]:
        """The rows and columns of the buffers."""
        return len(self._buffers[0]), self._buffers[0].shape[-2]

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self._buffers[0].device

    @property
    def size_bytes(self) -> int:
        """The bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for just these states: most prefilled rows are soon copied to another batch."""
        self.rows, tokens = len(key_states), key_states.shape[-2]
        self._buffers = tuple(
            _empty_buffer(like, self.rows, tokens) for like in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append one forward's states, [rows, heads, tokens, head_dim], and return used columns.

        Further arguments of models are for other kinds of layers, and ignored.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        if self.last + tokens > self.capacity[1]:
            self._move_used(0, self.rows, self.width + tokens)
        self.last += tokens
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, ..., self.last - tokens : self.last, :] = states
        keys, values = map(self._used, self._buffers)
        return keys, values

    def join(self, other: "GrowableKVLayer") -> None:
        """Append the rows of `other`; the rows of both end in the same column."""
        width, rows = max(self.width, other.width), self.rows + other.rows
        if rows > self.capacity[0] or self.last < width:
            # One more column, for the step that follows.
            self._move_used(width - self.width, rows, width + 1)
        new, self.rows = slice(self.rows, rows), rows
        self.first = self.last - width
        for buffer, source in zip(self._buffers, other._buffers, strict=True):
            buffer[new].zero_()
            buffer[new, ..., self.last - other.width : self.last, :] = other._used(source)

    def keep(self, staying: int, moved: Tensor, padding: int) -> None:
        """Keep the first `staying` rows, then the rows `moved`; drop the first `padding` columns.

        moved: [rows] int64, on the layer's device.
        """
        self.first += padding
        for buffer in self._buffers:
            used = buffer[..., self.first : self.last, :]
            used[staying : staying + len(moved)] = used.index_select(0, moved)
        self.rows = staying + len(moved)

    def copy_of(self, row: int) -> "GrowableKVLayer":
        """Return a layer with a copy of one row; empty for a layer that holds nothing."""
        copied = GrowableKVLayer()
        if self.is_initialized:
            with torch.inference_mode(False):
                copied._buffers = tuple(
                    self._used(buffer)[row : row + 1].clone() for buffer in self._buffers
                )
            copied.rows, copied.last, copied.is_initialized = 1, self.width, True
        return copied

    def shrink_to_fit(self) -> None:
        """Move to smaller buffers if much of the capacity is idle."""
        rows, columns = self.capacity
        needed = next_power_of_two(self.rows), next_power_of_two(self.width)
        if rows * columns > IDLE_CAPACITY_MAX * needed[0] * needed[1]:
            self._reallocate(0, next_power_of_two(self.rows), next_power_of_two(self.width + 1))

    def get_seq_length(self) -> int:
        """Return the number of columns before the columns of a forward."""
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns of the mask of `query_length` tokens, and the index of the first."""
        return self.width + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length has no bound."""
        return -1

    def reset(self) -> None:
        """Drop everything, the buffers included."""
        GrowableKVLayer.__init__(self)

    def _used(self, buffer: Tensor) -> Tensor:
        return buffer[: self.rows, ..., self.first : self.last, :]

    def _move_used(self, first: int, rows: int, width: int) -> None:
        """Move the used columns to `first`, with capacity for `rows` rows and `width` columns."""
        capacity = self.capacity
        if rows <= capacity[0] and width <= capacity[1]:
            for buffer in self._buffers:
                used = self._used(buffer).clone()
                buffer[: self.rows, ..., first : first + self.width, :] = used
            self.first, self.last = first, first + self.width
        else:
            needed = next_power_of_two(rows), next_power_of_two(width)
            self._reallocate(first, max(capacity[0], needed[0]), max(capacity[1], needed[1]))

    def _reallocate(self, first: int, rows: int, columns: int) -> None:
        """Move the used columns to new buffers, to begin at `first`."""
        moved = tuple(_empty_buffer(buffer, rows, columns) for buffer in self._buffers)
        for old, new in zip(self._buffers, moved, strict=True):
            new[: self.rows, ..., first : first + self.width, :] = self._used(old)
        self._buffers = moved
        self.first, self.last = first, first + self.width


def _empty_buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    # Tensors made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return like.new_zeros((rows, *like.shape[1:-2], columns, like.shape[-1]))


def left_padding_mask(lengths: Tensor, width: int) -> Tensor:
    """Return each row's own columns: [rows, width] int64, 1 in the last `lengths[row]` columns."""
    columns = torch.arange(width, device=lengths.device)
    return (columns >= width - lengths[:, None]).long()


class BatchKVCache(RowCache):
    """The keys and values of a batch, and the number of tokens of each row in them.

    In `cache`, every layer's keys and values are [rows, heads, width, head_dim], with the same
    width in all layers. The last `lengths[row]` columns are the row's own; the others are never
    read. `offsets` are not 0 if images advance positions by a number other than their tokens.
    """

    def __init__(self, lengths: Sequence[int], offsets: Sequence[int] = ()) -> None:
        """Make an empty cache for the first forward of rows with these numbers of tokens."""
        super().__init__(lengths, offsets)
        self.cache = Cache(layer_class_to_replicate=GrowableKVLayer)

    @property
    def layers(self) -> list[GrowableKVLayer]:
        """The layers that hold keys and values; one that reads another layer's cache holds none."""
        return [layer for layer in self.cache.layers if layer.is_initialized]

    @property
    def width(self) -> int:
        """The number of columns of every layer: at least the tokens of the longest row."""
        return next((layer.width for layer in self.layers), 0)

    @property
    def size_bytes(self) -> int:
        """The bytes of all layers' buffers."""
        return sum(layer.size_bytes for layer in self.layers)

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

    def join(self, other: Self) -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        if self.layers:
            for layer, added in zip(self.layers, other.layers, strict=True):
                layer.join(added)
        else:
            self.cache = other.cache
        self._join_counts(other)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the columns that are then padding in every row."""
        is_whole = list(rows) == list(range(len(self)))
        self._keep_counts(rows)
        if not rows:
            self.cache = Cache(layer_class_to_replicate=GrowableKVLayer)
            return
        padding = self.width - max(self.lengths)
        if is_whole and padding == 0:
            return
        staying = next((at for at, row in enumerate(rows) if at != row), len(rows))
        for layer in self.layers:
            moved = torch.tensor(rows[staying:], dtype=torch.int64, device=layer.device)
            layer.keep(staying, moved, padding)
            layer.shrink_to_fit()

    def take(self, row: int) -> "BatchKVCache":
        """Remove a row and return it in a separate cache."""
        taken = BatchKVCache([self.lengths[row]], [self.offsets[row]])
        taken.prompt_lengths = [self.prompt_lengths[row]]
        taken.cache.layers = [layer.copy_of(row) for layer in self.cache.layers]
        taken.keep([0])
        self.keep([other for other in range(len(self)) if other != row])
        return taken
