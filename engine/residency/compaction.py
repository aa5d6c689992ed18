"""Compaction of the arena: extents slide down until the free bytes form one hole.

A move that fails is not undone: its error ends the engine, and the controller loads the adapters
into the next one.
"""

from collections.abc import Collection
from typing import Final

import torch

from loradock.engine.memory import allocate_device
from loradock.engine.residency.copier import Copier
from loradock.engine.residency.extents import Extents

_BOUNCE_BYTES_MAX: Final = 16 << 20
"""The largest buffer for sliding an extent by less than its own size."""


class Compactor:
    """Slides the bytes of `extents` within `memory`, which is 1-D uint8, on any device.

    Allocates a buffer of at most 16 MiB on the same device. Raises `DeviceOutOfMemory`.
    """

    def __init__(self, memory: torch.Tensor, extents: Extents, copier: Copier) -> None:
        self._memory = memory
        self._extents = extents
        self._copier = copier
        bounce_bytes = min(memory.numel(), _BOUNCE_BYTES_MAX)
        self._bounce_buffer = allocate_device(bounce_bytes, memory.device)

    def make_hole(self, size_bytes: int, unmovable: Collection[int]) -> list[int] | None:
        """Slide extents down until there is a hole of `size_bytes`; return the owners that moved.

        Owners in `unmovable` stay. None if there is no such hole without moving one of them;
        then nothing was moved.
        """
        plan = self._extents.plan(size_bytes, unmovable)
        if plan is None:
            return None
        for move in plan:
            extent = self._extents[move.owner]
            self.slide(extent.start_bytes, move.start_bytes, extent.size_bytes)
            self._extents.apply(move)
        return [move.owner for move in plan]

    def slide(self, source: int, target: int, size: int) -> None:
        """Move `size` bytes from offset `source` down to offset `target`; the two may overlap.

        No single copy overlaps its own target. Raises what the copier raises.
        """
        step = max(source - target, self._bounce_buffer.numel())
        for start in range(0, size, step):
            self._slide_step(source + start, target + start, min(step, size - start))

    def _slide_step(self, source: int, target: int, length: int) -> None:
        source_view = self._memory[source : source + length]
        target_view = self._memory[target : target + length]
        if source - target < length:
            buffer = self._bounce_buffer[:length]
            self._copier.move(buffer, source_view)
            source_view = buffer
        self._copier.move(target_view, source_view)
