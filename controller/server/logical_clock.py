"""Recorded time: it continues from the log, advances by a monotonic clock and never jumps.

Every deadline is a recorded time and is awaited in recorded time, so no step of the wall clock
ends, delays or starts anything. The wall clock is a label: each epoch records at its start how far
the wall clock is ahead, and a later step changes no label of that epoch.

Time does not count against deadlines while no controller runs or the machine is suspended. Neither
does the time between the last record and the end of a process, because nothing has recorded it.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple


class Clocks(NamedTuple):
    """Clocks of a machine, in nanoseconds; only `wall_ns` (UTC) may jump."""

    wall_ns: Callable[[], int]
    monotonic_ns: Callable[[], int]


SYSTEM_CLOCKS: Final = Clocks(time.time_ns, time.monotonic_ns)


class LogicalClock:
    """The clock of one epoch's records."""

    def __init__(self, last_ns: int, clocks: Clocks) -> None:
        """Continue from `last_ns`, the last recorded time; from wall time where that is 0."""
        self._clocks: Final = clocks
        self._offset_ns: Final = (last_ns or clocks.wall_ns()) - clocks.monotonic_ns()

    def now_ns(self) -> int:
        """Return the recorded time of this moment, in nanoseconds; it never decreases."""
        return self._clocks.monotonic_ns() + self._offset_ns

    def wall_ns(self) -> int:
        """Return the wall clock's time (UTC) in nanoseconds, for a label or an epoch's number."""
        return self._clocks.wall_ns()
