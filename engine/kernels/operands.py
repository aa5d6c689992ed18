"""What every LoRA kernel reads: where the weights lie, and which rows belong to which slot.

What it is: frozen views. What it is not: an owner of memory; the arena and the Punica wrapper own
what these point at. One rule: rows of the base model (slot -1) are in no group, so no kernel ever
indexes a table with -1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.staging import a_elements


class Directory(NamedTuple):
    """The arena and the tables that say what lies where in it.

    data: [elements]. offsets: [slots, columns] int64, in elements, -1 where a slot has nothing.
    ranks: [slots, columns] int32. host_offsets, host_ranks: the same on the host, never a copy of
    a moment: their contents follow every slot that is written or reset.
    """

    data: Tensor
    offsets: Tensor
    ranks: Tensor
    host_offsets: Tensor
    host_ranks: Tensor


@dataclass(frozen=True, slots=True)
class LoRASlices:
    """One wrapped layer's columns of the slot directory.

    Slice `s` of the layer is column `columns[s]`; there A is [rank, in_features] at the offset,
    and B [out_features[s], rank] behind it, at the next multiple of 128 bytes.
    """

    directory: Directory
    columns: tuple[int, ...]
    in_features: int
    out_features: tuple[int, ...]

    def lora_a(self, slot: int, place: int) -> Tensor | None:
        """A of slice `place` as a view [rank, in_features]; None where the slot has none."""
        offset, rank = self._entry(slot, place)
        return None if offset < 0 else self._matrix(offset, rank, self.in_features)

    def lora_b(self, slot: int, place: int) -> Tensor | None:
        """B of slice `place` as a view [out_features[place], rank]; None where there is none."""
        offset, rank = self._entry(slot, place)
        if offset < 0:
            return None
        behind_a = offset + a_elements(rank, self.in_features, self.directory.data.dtype)
        return self._matrix(behind_a, self.out_features[place], rank)

    def _entry(self, slot: int, place: int) -> tuple[int, int]:
        column = self.columns[place]
        directory = self.directory
        return int(directory.host_offsets[slot, column]), int(directory.host_ranks[slot, column])

    def _matrix(self, offset: int, rows: int, width: int) -> Tensor:
        return self.directory.data[offset : offset + rows * width].view(rows, width)


class Span(NamedTuple):
    """One group: the rows `groups.rows[start:end]` use `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Groups:
    """A batch's rows that have an adapter, sorted stably by slot.

    rows: [n] int64. slots, counts, starts: [active] int64, beside `rows` on the device. spans: the
    same three on the host. tokens: how many rows the whole batch has.
    """

    rows: Tensor
    slots: Tensor
    counts: Tensor
    starts: Tensor
    spans: tuple[Span, ...]
    tokens: int


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for float64: what partial sums of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
