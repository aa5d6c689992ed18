"""One layer's keys and values, in buffers with more room than is used.

What it is: `transformers`' cache layer over buffers that a decode step writes one column of, and
the same buffers as a layer of a step that is captured. What it is not: a judge of whose a column
is; `kv_cache` counts each row's tokens. One rule: in a row's columns that are not its own lies what
the row itself had there, or zeros, never what another row left; attention gives them no weight, but
not even weight 0 makes up for a NaN.
"""

from typing import Final

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from engine.layout import power_of_two

IDLE_ROOM_MAX: Final = 4
"""How many times the room that rows would be given now may be kept for them."""


class RoomyLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of `rows` rows, whose columns from `first` to before `last` are used.

    Room grows to powers of two, in rows and in columns, so most changes move nothing. `place`
    stands for the buffers: it is another object once they are.
    """

    is_sliding = False

    def __init__(self) -> None:
        # What the base class's constructor says, but for the keys and values: they are properties.
        self.is_initialized = False
        self.rows = self.first = self.last = 0
        self.place = object()
        self._buffers: tuple[Tensor, ...] = ()

    @property
    def keys(self) -> Tensor | None:
        """What is used, [rows, heads, width, head_dim]: a view that is good until a change."""
        return self._used(self._buffers[0]) if self._buffers else None

    @property
    def values(self) -> Tensor | None:
        """As the keys."""
        return self._used(self._buffers[1]) if self._buffers else None

    @property
    def width(self) -> int:
        """How many columns are used."""
        return self.last - self.first

    @property
    def room(self) -> tuple[int, int]:
        """The rows and columns of the buffers."""
        return len(self._buffers[0]), self._buffers[0].shape[-2]

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._buffers[0].device

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for just these states: most first forwards bring rows that join others."""
        self.rows, tokens = len(key_states), key_states.shape[-2]
        self._buffers = tuple(_room(like, self.rows, tokens) for like in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one forward's states, [rows, heads, tokens, head_dim], behind those that are here.

        What models pass beside them is for other kinds of layers.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[-2]
        if self.last + tokens > self.room[1]:
            self._lie(0, self.rows, self.width + tokens)
        self.last += tokens
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, ..., self.last - tokens : self.last, :] = states
        keys, values = map(self._used, self._buffers)
        return keys, values

    def join(self, other: "RoomyLayer") -> None:
        """Take the rows of `other` after the own ones; all rows end in one column."""
        width, rows = max(self.width, other.width), self.rows + other.rows
        if rows > self.room[0] or self.last < width:
            # One column more, for the step that follows.
            self._lie(width - self.width, rows, width + 1)
        new, self.rows = slice(self.rows, rows), rows
        self.first = self.last - width
        for buffer, theirs in zip(self._buffers, other._buffers, strict=True):
            buffer[new].zero_()
            buffer[new, ..., self.last - other.width : self.last, :] = other._used(theirs)

    def keep(self, staying: int, moved: Tensor, padding: int) -> None:
        """Keep the first `staying` rows and then `moved`; drop the first `padding` columns.

        moved: [rows] int64, on the layer's device.
        """
        self.first += padding
        for buffer in self._buffers:
            used = buffer[..., self.first : self.last, :]
            used[staying : staying + len(moved)] = used.index_select(0, moved)
        self.rows = staying + len(moved)

    def clear(self) -> None:
        """Drop all rows, and keep the room."""
        self.rows = self.first = self.last = 0

    def give_back(self) -> None:
        """Move to smaller buffers where much of the room is idle."""
        rows, columns = self.room
        needed = power_of_two(self.rows), power_of_two(self.width)
        if rows * columns > IDLE_ROOM_MAX * needed[0] * needed[1]:
            self._reallocate(0, power_of_two(self.rows), power_of_two(self.width + 1))

    def provide(self, rows: int, columns: int) -> None:
        """Let the next column be one of the buffers' first `columns`, and `rows` rows have room."""
        room = self.room
        if self.last >= columns or rows > room[0] or columns > room[1]:
            self._lie(0, rows, columns)

    def fixed(self, rows: int, columns: int, column: Tensor) -> "FixedLayer":
        """The first rows and columns of the buffers, of which a step writes the one at `column`."""
        keys, values = (buffer[:rows, ..., :columns, :] for buffer in self._buffers)
        return FixedLayer(keys, values, column)

    def get_seq_length(self) -> int:
        """How many columns there are before a forward's own."""
        return self.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a mask has in a forward of `query_length` tokens, and its first."""
        return self.width + query_length, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        RoomyLayer.__init__(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows, in this order."""
        self.keep(0, beam_idx, 0)

    def _used(self, buffer: Tensor) -> Tensor:
        return buffer[: self.rows, ..., self.first : self.last, :]

    def _lie(self, first: int, rows: int, width: int) -> None:
        """Let the used columns begin at `first`, with room for so many rows, and columns in all."""
        room = self.room
        if rows <= room[0] and width <= room[1]:
            for buffer in self._buffers:
                used = self._used(buffer).clone()
                buffer[: self.rows, ..., first : first + self.width, :] = used
            self.first, self.last = first, first + self.width
        else:
            wanted = power_of_two(rows), power_of_two(width)
            self._reallocate(first, max(room[0], wanted[0]), max(room[1], wanted[1]))

    def _reallocate(self, first: int, rows: int, columns: int) -> None:
        """Move what is used to new buffers, from column `first` on."""
        moved = tuple(_room(buffer, rows, columns) for buffer in self._buffers)
        for old, new in zip(self._buffers, moved, strict=True):
            new[: self.rows, ..., first : first + self.width, :] = self._used(old)
        self._buffers, self.place = moved, object()
        self.first, self.last = first, first + self.width


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer for steps of one token whose places and sizes are the same in every step.

    keys, values: [rows, heads, columns, head_dim], of which all are read; which of them count is
    the mask's to say. column: [1] int64 on their device, where the step's token is written.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._column = column

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: it has its buffers from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one token's states, [rows, heads, 1, head_dim]."""
        self.keys.index_copy_(-2, self._column, key_states)
        self.values.index_copy_(-2, self._column, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        """The columns before the step's own, on the device."""
        return self._column[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns, whatever the step brings."""
        del query_length
        return self.keys.shape[-2], 0

    def get_max_length(self) -> int:
        """All columns."""
        return self.keys.shape[-2]


def _room(like: Tensor, rows: int, columns: int) -> Tensor:
    # Tensors made in inference mode could not be written outside of it.
    with torch.inference_mode(False):
        return like.new_zeros((rows, *like.shape[1:-2], columns, like.shape[-1]))
