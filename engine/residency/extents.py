"""Extents of the arena, the bytes of each owner, and their compaction.

Extents never overlap, and extents and holes together are exactly the capacity. For a hole, extents
slide down until the free bytes are together. A move that fails is not undone: its error ends the
engine, and the controller loads the adapters into the next one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from loradock.engine.layout import ALIGNMENT_BYTES
from loradock.engine.memory import allocate_device
from loradock.engine.residency.copier import Copier

_BOUNCE_BYTES_MAX: Final = 16 << 20
"""The largest buffer for sliding an extent by less than its own size."""


@dataclass(frozen=True)
class Extent:
    """A range of the arena's bytes; both numbers are multiples of 128."""

    start_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """The offset of the first byte after the extent."""
        return self.start_bytes + self.size_bytes


class Move(NamedTuple):
    """A step of a plan: slide an owner's extent down to `start_bytes`."""

    owner: int
    start_bytes: int


class Extents:
    """The extents of one arena, by the number of their owner; arithmetic alone."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._extents: dict[int, Extent] = {}

    def __getitem__(self, owner: int) -> Extent:
        return self._extents[owner]

    def allocate(self, owner: int, size_bytes: int) -> Extent | None:
        """Allocate the start of the smallest hole that is large enough; None if there is none."""
        holes = [hole for hole in self._holes() if hole.size_bytes >= size_bytes]
        if not holes:
            return None
        hole = min(holes, key=lambda hole: hole.size_bytes)
        extent = self._extents[owner] = Extent(hole.start_bytes, size_bytes)
        self.free_bytes -= size_bytes
        return extent

    def has_hole(self, size_bytes: int) -> bool:
        """Return whether `allocate` would succeed."""
        return any(hole.size_bytes >= size_bytes for hole in self._holes())

    def free(self, owner: int) -> None:
        """Free an owner's extent."""
        self.free_bytes += self._extents.pop(owner).size_bytes

    def apply(self, move: Move) -> None:
        """Record that an extent's bytes were moved."""
        size_bytes = self._extents[move.owner].size_bytes
        self._extents[move.owner] = Extent(move.start_bytes, size_bytes)

    def plan(self, size_bytes: int, unmovable: Collection[int]) -> list[Move] | None:
        """Return the moves that make a hole of `size_bytes` and copy the fewest bytes, in order.

        A hole is made by sliding a run of neighbours down. The cheapest run is found in one pass
        with two indices that only increase, because a longer run never frees fewer bytes. None if
        the hole would take moving an extent in `unmovable`.
        """
        order = self._sorted_owners()
        best: tuple[int, int, int] | None = None
        first, run_bytes = 0, 0
        for last, owner in enumerate(order):
            run_bytes += self._extents[owner].size_bytes
            if owner in unmovable:
                first, run_bytes = last + 1, 0
                continue
            available = self._gap_end(order, last) - run_bytes
            while first < last:
                dropped = self._extents[order[first]]
                if available + dropped.size_bytes - dropped.end_bytes < size_bytes:
                    break
                available += dropped.size_bytes
                run_bytes -= dropped.size_bytes
                first += 1
            if available - self._gap_start(order, first) >= size_bytes:
                best = min(best or (run_bytes, first, last), (run_bytes, first, last))
        return None if best is None else self._slide_down(order, best[1], best[2])

    def check(self) -> None:
        """Raise `AssertionError` unless extents are aligned, disjoint, inside, and add up."""
        end, taken = 0, 0
        for extent in map(self.__getitem__, self._sorted_owners()):
            if extent.start_bytes < end or extent.size_bytes <= 0:
                raise AssertionError(f"{extent} overlaps one that ends at {end}, or is empty")
            if extent.start_bytes % ALIGNMENT_BYTES or extent.size_bytes % ALIGNMENT_BYTES:
                raise AssertionError(f"{extent} is not aligned to {ALIGNMENT_BYTES} bytes")
            end, taken = extent.end_bytes, taken + extent.size_bytes
        if end > self.capacity_bytes or taken + self.free_bytes != self.capacity_bytes:
            raise AssertionError(
                f"{taken} bytes taken up to {end}, {self.free_bytes} free, "
                f"of a capacity of {self.capacity_bytes}"
            )

    def _sorted_owners(self) -> list[int]:
        return sorted(self._extents, key=lambda owner: self._extents[owner].start_bytes)

    def _holes(self) -> Iterator[Extent]:
        start = 0
        for extent in map(self.__getitem__, self._sorted_owners()):
            if extent.start_bytes > start:
                yield Extent(start, extent.start_bytes - start)
            start = extent.end_bytes
        if self.capacity_bytes > start:
            yield Extent(start, self.capacity_bytes - start)

    def _gap_start(self, order: list[int], first: int) -> int:
        return self._extents[order[first - 1]].end_bytes if first else 0

    def _gap_end(self, order: list[int], last: int) -> int:
        above = last + 1
        return (
            self._extents[order[above]].start_bytes if above < len(order) else self.capacity_bytes
        )

    def _slide_down(self, order: list[int], first: int, last: int) -> list[Move]:
        moves, start = [], self._gap_start(order, first)
        for owner in order[first : last + 1]:
            if start < self._extents[owner].start_bytes:
                moves.append(Move(owner, start))
            start += self._extents[owner].size_bytes
        return moves


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

        Owners in `unmovable` stay. None if no such hole is possible without moving them;
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
