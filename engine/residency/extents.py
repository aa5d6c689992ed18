"""Which bytes of the arena belong to whom.

What it is: arithmetic on extents, and plans for making room. What it is not: a mover of bytes; it
knows no tensor. One rule: extents never overlap, and what they and the holes between them take is
the capacity, exactly.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.layout import ALIGNMENT_BYTES


@dataclass(frozen=True)
class Extent:
    """A piece of the arena, in bytes; both numbers are multiples of 128."""

    start_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.start_bytes + self.size_bytes


class Move(NamedTuple):
    """Slide an owner's extent down to `start_bytes`."""

    owner: int
    start_bytes: int


class Extents:
    """The extents of one arena, each under its owner's number."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._extents: dict[int, Extent] = {}

    def __getitem__(self, owner: int) -> Extent:
        return self._extents[owner]

    def place(self, owner: int, size_bytes: int) -> Extent | None:
        """Give `owner` the smallest hole that is large enough; None where there is none."""
        holes = [hole for hole in self._holes() if hole.size_bytes >= size_bytes]
        if not holes:
            return None
        hole = min(holes, key=lambda hole: hole.size_bytes)
        extent = self._extents[owner] = Extent(hole.start_bytes, size_bytes)
        self.free_bytes -= size_bytes
        return extent

    def drop(self, owner: int) -> None:
        """Free an owner's extent."""
        self.free_bytes += self._extents.pop(owner).size_bytes

    def move(self, move: Move) -> None:
        """Enter that an extent lies elsewhere now."""
        size_bytes = self._extents[move.owner].size_bytes
        self._extents[move.owner] = Extent(move.start_bytes, size_bytes)

    def plan(self, size_bytes: int, fixed: Collection[int]) -> list[Move] | None:
        """The moves that make a hole of `size_bytes` and copy the fewest bytes, in their order.

        A hole is made by sliding a run of neighbours down. The run is found with two ends that
        only walk upwards, because a longer run never has less room. None where only moving a
        `fixed` extent would make the room.
        """
        order = self._in_order()
        best: tuple[int, int, int] | None = None
        first, run_bytes = 0, 0
        for last, owner in enumerate(order):
            run_bytes += self._extents[owner].size_bytes
            if owner in fixed:
                first, run_bytes = last + 1, 0
                continue
            room = self._gap_end(order, last) - run_bytes
            while first < last:
                dropped = self._extents[order[first]]
                if room + dropped.size_bytes - dropped.end_bytes < size_bytes:
                    break
                room, run_bytes = room + dropped.size_bytes, run_bytes - dropped.size_bytes
                first += 1
            if room - self._gap_start(order, first) >= size_bytes:
                best = min(best or (run_bytes, first, last), (run_bytes, first, last))
        return None if best is None else self._slide_down(order, best[1], best[2])

    def check(self) -> None:
        """Raise `AssertionError` unless extents are aligned, apart, inside, and add up."""
        end, taken = 0, 0
        for extent in map(self.__getitem__, self._in_order()):
            if extent.start_bytes < end or extent.size_bytes <= 0:
                raise AssertionError(f"{extent} overlaps what ends at {end}, or is empty")
            if extent.start_bytes % ALIGNMENT_BYTES or extent.size_bytes % ALIGNMENT_BYTES:
                raise AssertionError(f"{extent} is not aligned to {ALIGNMENT_BYTES} bytes")
            end, taken = extent.end_bytes, taken + extent.size_bytes
        if end > self.capacity_bytes or taken + self.free_bytes != self.capacity_bytes:
            raise AssertionError(
                f"{taken} bytes taken up to {end}, {self.free_bytes} free, "
                f"{self.capacity_bytes} in all"
            )

    def _in_order(self) -> list[int]:
        return sorted(self._extents, key=lambda owner: self._extents[owner].start_bytes)

    def _holes(self) -> Iterator[Extent]:
        start = 0
        for extent in map(self.__getitem__, self._in_order()):
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
