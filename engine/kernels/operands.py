"""What every LoRA kernel reads: where the weights lie, and which rows belong to which slot.

What it is: the operands that all implementations share. What it is not: an owner of memory; the
arena and the Punica wrapper own what these point at. One rule: rows of the base model (slot -1) are
in no group, so no kernel ever indexes a table with -1.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.kernels.directory import Edition
from engine.layout import ModuleKind, ModuleShape, aligned_elements


class Directory(NamedTuple):
    """The arena and the tables that say what lies where in it.

    data: [elements]. offsets: [slots, columns] int64, in elements, -1 where a slot has nothing.
    ranks: [slots, columns] int32. host_offsets, host_ranks: the same on the host, never a copy of
    a moment: their contents follow every slot that is written or reset, and then `edition.number`
    grows.
    """

    data: Tensor
    offsets: Tensor
    ranks: Tensor
    host_offsets: Tensor
    host_ranks: Tensor
    edition: Edition


class Pair(NamedTuple):
    """One slot's matrices for one slice, as views of the arena, in the shapes of `ModuleKind`."""

    a: Tensor
    b: Tensor


class LoRASlices:
    """One wrapped layer's columns of the slot directory.

    Slice `s` of the layer is column `columns[s]`; there A lies at the offset, and B behind it, at
    the next multiple of 128 bytes. `kind` decides their shapes: for LINEAR A is [rank,
    in_features] and B [out_features[s], rank], for EMBEDDING A is [in_features, rank], for EXPERTS
    both have `experts` in front.

    Views are made once for each edition of the directory: what an older one said is forgotten.
    """

    def __init__(
        self,
        directory: Directory,
        columns: tuple[int, ...],
        in_features: int,
        out_features: tuple[int, ...],
        kind: ModuleKind = ModuleKind.LINEAR,
        experts: int = 1,
    ) -> None:
        self.directory = directory
        self.columns = columns
        self.in_features = in_features
        self.out_features = out_features
        self.kind = kind
        self.experts = experts
        self._edition = -1
        self._pairs: dict[int, tuple[Pair | None, ...]] = {}

    def pairs(self, slot: int) -> tuple[Pair | None, ...]:
        """A and B of each slice; None for a slice where the slot has nothing."""
        if self._edition != self.directory.edition.number:
            self._pairs.clear()
            self._edition = self.directory.edition.number
        if slot not in self._pairs:
            self._pairs[slot] = tuple(map(self._pair, self._entries(slot), self.out_features))
        return self._pairs[slot]

    def _entries(self, slot: int) -> list[tuple[int, int]]:
        columns = list(self.columns)
        offsets = self.directory.host_offsets[slot, columns].tolist()
        return list(zip(offsets, self.directory.host_ranks[slot, columns].tolist(), strict=True))

    def _pair(self, entry: tuple[int, int], out_features: int) -> Pair | None:
        offset, rank = entry
        if offset < 0:
            return None
        shape = ModuleShape("", self.in_features, out_features, 0, False, self.kind, self.experts)
        a_shape = shape.a_shape(rank)
        behind_a = offset + aligned_elements(math.prod(a_shape), self.directory.data.dtype)
        return Pair(
            self._matrix(offset, a_shape),
            self._matrix(behind_a, shape.b_shape(rank)),
        )

    def _matrix(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        return self.directory.data[offset : offset + math.prod(shape)].view(shape)


class Span(NamedTuple):
    """One group: the rows `groups.rows[start:end]` use `slot`."""

    slot: int
    start: int
    end: int


TILE_ROWS: Final = (16, 64)
"""The heights that groups are cut to for kernels: few rows each, and long segments."""


class GroupBounds(NamedTuple):
    """The most rows, the most active groups and the highest rank that a launch has to reach.

    They are what a batch's shape is rounded up to, and all that a launch's grid may depend on.
    """

    tokens: int
    groups: int
    rank: int

    def tiles(self, height: int) -> int:
        """The most tiles of `height` rows that any batch within these bounds has."""
        return min(self.tokens, (self.tokens + self.groups * (height - 1)) // height)


class Tiles(NamedTuple):
    """The groups, each cut into blocks of at most `height` rows.

    table: [bound, 3] int64 on the device: slot, first place in `Groups.rows`, rows; zero rows
    behind the last tile.
    """

    height: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """A batch's rows that have an adapter, sorted stably by slot.

    rows: [n] int64. slots, counts, starts: [active] int64, beside `rows` on the device. spans: the
    same three on the host. tokens: how many rows the whole batch has. token_slots: [tokens] int64,
    each one's slot, -1 for the base model. active: [1] int64 on the device, the number of groups.
    tiles: one table for each height of `TILE_ROWS`. bounds: what grids are sized by. The device's
    tables have the room of the bounds, so a kernel may read them from the first entry of `rows` up
    to `bounds.tokens`, whatever their views' lengths say.
    """

    rows: Tensor
    slots: Tensor
    counts: Tensor
    starts: Tensor
    spans: tuple[Span, ...]
    tokens: int
    token_slots: Tensor
    active: Tensor
    tiles: tuple[Tiles, ...]
    bounds: GroupBounds

    @property
    def longest(self) -> int:
        """The rows of the longest group."""
        return max((end - start for _, start, end in self.spans), default=0)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for float64: what partial sums of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
