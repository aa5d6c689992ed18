"""Operands of every LoRA kernel: a layer's weights in the arena, and a batch's rows by slot.

The arena and the Punica wrapper own the memory that these objects refer to. Rows of the base model
(slot -1) are in no group, so no kernel indexes a table with -1.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.layout import ModuleKind, ModuleShape, matrices_of


class LoRAPair(NamedTuple):
    """A and B of one slot and one slice, as views of the arena in the shapes of `ModuleKind`."""

    a: Tensor
    b: Tensor


class RowOrder(Enum):
    """The order of the rows in a layer's input.

    MAPPING: that of the batch's mapping. COLUMNS: the input is [tokens, rows, ...], with the rows
    in the mapping's order. UNKNOWN: the model's own, so a batch can have one adapter only.
    """

    MAPPING = "mapping"
    COLUMNS = "columns"
    UNKNOWN = "unknown"


class LoRASlices:
    """One wrapped layer's columns of the slot directory.

    Slice `s` is column `columns[s]` of `directory`: A starts at the
    column's offset, and B after A at the next multiple of 128 bytes. `kind` determines their
    shapes: for LINEAR A is [rank, in_features] and B is [out_features[s], rank]; for EMBEDDING A is
    [in_features, rank]; for EXPERTS both have a leading dimension `experts`.

    Views of the weights and the highest rank are cached for one version of the directory.
    `row_order`: of the layer's input.
    """

    row_order = RowOrder.MAPPING

    def __init__(
        self,
        directory: SlotDirectory,
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
        self._version = -1
        self._pairs: dict[int, tuple[LoRAPair | None, ...]] = {}
        self._rank_max: int | None = None

    def pairs(self, slot: int) -> tuple[LoRAPair | None, ...]:
        """Return A and B of each slice; None for a slice that is absent from the slot."""
        if self._version != self.directory.version:
            self._forget()
        if slot not in self._pairs:
            self._pairs[slot] = tuple(map(self._pair, self._entries(slot), self.out_features))
        return self._pairs[slot]

    @property
    def rank_max(self) -> int:
        """The highest rank of any slot in the columns."""
        if self._version != self.directory.version:
            self._forget()
        if self._rank_max is None:
            self._rank_max = int(self.directory.host_ranks[:, list(self.columns)].max())
        return self._rank_max

    def _forget(self) -> None:
        """Forget what was cached for an earlier version of the directory."""
        self._version = self.directory.version
        self._pairs.clear()
        self._rank_max = None

    def ranks(self, slot: int) -> tuple[int, ...]:
        """Return the rank of each slice; 0 for a slice that is absent from the slot."""
        return tuple([0 if pair is None else pair.b.shape[-1] for pair in self.pairs(slot)])

    def _entries(self, slot: int) -> list[tuple[int, int]]:
        columns = list(self.columns)
        offsets = self.directory.host_offsets[slot, columns].tolist()
        return list(zip(offsets, self.directory.host_ranks[slot, columns].tolist(), strict=True))

    def _pair(self, entry: tuple[int, int], out_features: int) -> LoRAPair | None:
        offset, rank = entry
        if offset < 0:
            return None
        shape = ModuleShape("", self.in_features, out_features, 0, False, self.kind, self.experts)
        return LoRAPair(*matrices_of(self.directory.data, offset, rank, shape))


class SlotSpan(NamedTuple):
    """One group: `groups.rows[start:end]` are the rows that use `slot`."""

    slot: int
    start: int
    end: int


TILE_ROWS: Final = (16, 64)
"""The tile sizes (block_m) that groups are divided into: for few rows each, and for long groups."""


class GroupBounds(NamedTuple):
    """Upper bounds of a batch: its rows, its active groups and the highest rank.

    They are the batch's shape rounded up, and the only input of a launch's grid.
    """

    tokens: int
    groups: int
    rank: int

    def max_tiles(self, block_m: int) -> int:
        """Return the most tiles of `block_m` rows in any batch within these bounds."""
        return min(self.tokens, (self.tokens + self.groups * (block_m - 1)) // block_m)


class Tiles(NamedTuple):
    """The groups divided into tiles of at most `block_m` rows.

    table: [bound, 3] int64 on the device: slot, first index into `Groups.rows`, rows. Entries after
    the last tile have zero rows.
    """

    block_m: int
    table: Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """A batch's rows that use an adapter, sorted stably by slot.

    rows: [n] int64. spans: each group, on the host. tokens: rows of the whole batch. token_slots:
    [tokens] int64, each row's slot, -1 for the base model. tiles: one table for each size of
    `TILE_ROWS`. bounds: the size of launch grids. The device's tables have the capacity of the
    bounds, so a kernel may read up to `bounds.tokens` entries from the start of `rows` even if the
    view is shorter.
    """

    rows: Tensor
    spans: tuple[SlotSpan, ...]
    tokens: int
    token_slots: Tensor
    tiles: tuple[Tiles, ...]
    bounds: GroupBounds

    @property
    def longest(self) -> int:
        """The rows of the longest group."""
        return max((end - start for _, start, end in self.spans), default=0)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial sums of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
