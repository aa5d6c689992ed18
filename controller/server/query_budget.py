"""The time that queries may take from the main loop.

While no other request arrives, queries take a slice of every iteration. While others do, the slices
are short and pauses follow them, so that few requests find the loop busy with a query. Times are
nanoseconds of a monotonic clock.
"""

from typing import Final

QUIET_SLICE_NS: Final = 2_000_000
"""Bound on the time for queries per iteration while no other request arrives."""

BUSY_SLICE_NS: Final = 150_000
"""The same while others arrive; the last query of either may exceed it."""

PAUSE_FACTOR: Final = 40
"""A pause is this many times as long as the slice before it."""

PAUSE_NS_MAX: Final = 200_000_000
"""Bound on a pause: what made a slice so long was not its queries, but a busy machine."""

BUSY_NS: Final = 100_000_000
"""Requests arrive if one arrived during this time."""


class QueryBudget:
    """The end of the current slice, and when the next one may begin."""

    def __init__(self) -> None:
        self._busy_until = 0
        self._next_ns = 0
        self._started_ns = 0
        self._ends_ns = 0

    def note_request(self, now_ns: int) -> None:
        """Note the arrival of a request that is not a query."""
        self._busy_until = now_ns + BUSY_NS

    def wait_ns(self, now_ns: int) -> int:
        """Return how long queries have to wait for the next slice, 0 if it may begin."""
        return max(0, self._next_ns - now_ns)

    def begin(self, now_ns: int) -> bool:
        """Begin a slice; False where a pause has not ended."""
        if now_ns < self._next_ns:
            return False
        self._started_ns = now_ns
        is_busy = now_ns < self._busy_until
        self._ends_ns = now_ns + (BUSY_SLICE_NS if is_busy else QUIET_SLICE_NS)
        return True

    def is_over(self, now_ns: int) -> bool:
        """Whether the slice has ended."""
        return now_ns >= self._ends_ns

    def end(self, now_ns: int) -> None:
        """End the slice; a pause follows while other requests arrive."""
        pause_ns = min(PAUSE_FACTOR * (now_ns - self._started_ns), PAUSE_NS_MAX)
        self._next_ns = now_ns + pause_ns if now_ns < self._busy_until else 0
