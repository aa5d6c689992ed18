"""Layers that an adapter replaces whole (`modules_to_save`).

A saved layer is computed exactly as the base layer is, for the rows of its adapter.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from engine.layout import ABSENT
from engine.punica.wrapper import PunicaWrapper
from engine.residency.arena import Arena


class SavedRows(NamedTuple):
    """The rows of one adapter that has replaced the layer: weight `[out, in]`, bias `[out]`."""

    rows: Tensor
    weight: Tensor
    bias: Tensor


class SavedWeights:
    """The column of the directory with the layers that adapters have saved."""

    def __init__(self, arena: Arena, column: int) -> None:
        self._arena = arena
        self._column = column
        self._version = -1
        self._slots: frozenset[int] = frozenset()

    @property
    def slots(self) -> frozenset[int]:
        """The slots whose adapters have the layer."""
        directory = self._arena.directory
        if self._version != directory.version:
            present = directory.host_offsets[:, self._column] != ABSENT
            self._slots = frozenset(present.nonzero().flatten().tolist())
            self._version = directory.version
        return self._slots

    def rows_of(self, punica: PunicaWrapper | None, count: int) -> Iterator[SavedRows]:
        """Yield the rows of each adapter that has the layer, among `count` rows of the input."""
        groups = None if punica is None or not self.slots else punica.groups_of(count)
        if groups is None:
            return
        for slot, start, end in groups.spans:
            saved = self._arena.weights(slot, self._column) if slot in self.slots else None
            if saved is not None:
                yield SavedRows(groups.rows[start:end], saved[0], saved[1].flatten())
