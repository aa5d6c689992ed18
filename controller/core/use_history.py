"""When adapters will be used again, by the times of their earlier uses.

An adapter that is used in bursts at even intervals (jobs of a schedule, a user's daily hours) is
expected one interval after its last burst began. What is used at random is expected never: its
intervals differ too much.
"""

import heapq
from collections import OrderedDict
from typing import Final

from msgspec import Struct

from loradock.messages.ids import AdapterName

ADAPTERS_MAX: Final = 10_000
"""Adapters that are remembered; what was used least recently is forgotten first."""

LEAD_NS: Final = 1_000_000_000
"""The time that a prefetch has to load its adapter."""

_BURST_NS: Final = 5_000_000_000
_BURST_SHARE: Final = 4
"""Uses belong to one burst if less than five seconds, or one of this many parts of an interval,
are between them."""

_INTERVALS_MIN: Final = 3
"""Intervals that an expectation needs."""

_DEVIATION_SHARE: Final = 8
"""Intervals are even if their mean deviation is at most one of this many parts of their mean."""

_WEIGHT: Final = 4
"""A new interval has one of this many parts of the weight in the means."""


class _Uses(Struct):
    burst_ns: int
    last_ns: int
    interval_ns: int = 0
    deviation_ns: int = 0
    intervals: int = 0


class UseHistory:
    """The uses of adapters up to now, and what they say about later ones.

    An adapter is due `LEAD_NS` and its intervals' mean deviation before it is expected.
    """

    def __init__(self, adapters_max: int = ADAPTERS_MAX) -> None:
        self._adapters_max = adapters_max
        self._uses: OrderedDict[AdapterName, _Uses] = OrderedDict()
        # (when it is due, the adapter, the start of the burst from which it follows).
        self._due: list[tuple[int, AdapterName, int]] = []

    def use(self, adapter: AdapterName, time_ns: int) -> None:
        """Record a use; times don't decrease."""
        found = self._uses.get(adapter)
        if found is None:
            self._uses[adapter] = _Uses(time_ns, time_ns)
            if len(self._uses) > self._adapters_max:
                self._uses.popitem(last=False)
            return
        self._uses.move_to_end(adapter)
        since_ns, found.last_ns = time_ns - found.last_ns, time_ns
        if since_ns >= max(_BURST_NS, found.interval_ns // _BURST_SHARE):
            self._begin_burst(adapter, found, time_ns)

    def next_ns(self) -> int | None:
        """Return when an adapter is due next; None if no use is expected."""
        return self._due[0][0] if self._due else None

    def take_due(self, time_ns: int) -> list[AdapterName]:
        """Return the adapters that are due by now and not used since they were expected."""
        found = []
        while self._due and self._due[0][0] <= time_ns:
            _, adapter, burst_ns = heapq.heappop(self._due)
            uses = self._uses.get(adapter)
            if uses is not None and uses.burst_ns == burst_ns:
                found.append(adapter)
        return found

    def _begin_burst(self, adapter: AdapterName, uses: _Uses, time_ns: int) -> None:
        interval_ns, uses.burst_ns = time_ns - uses.burst_ns, time_ns
        if not uses.intervals:
            uses.interval_ns = interval_ns
        else:
            error_ns = abs(interval_ns - uses.interval_ns)
            uses.deviation_ns += (error_ns - uses.deviation_ns) // _WEIGHT
            uses.interval_ns += (interval_ns - uses.interval_ns) // _WEIGHT
        uses.intervals += 1
        if uses.intervals < _INTERVALS_MIN:
            return
        if uses.deviation_ns <= uses.interval_ns // _DEVIATION_SHARE:
            early_ns = LEAD_NS + uses.deviation_ns
            heapq.heappush(self._due, (time_ns + uses.interval_ns - early_ns, adapter, time_ns))
