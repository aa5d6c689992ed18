"""Counters and durations of a manager. A call that fails is not counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

MEBIBYTE: Final = 1 << 20
"""The bytes of a MiB."""

Clock = Callable[[], float]
"""A monotonic clock, in seconds."""


@dataclass
class Durations:
    """The number of calls, and their durations: the sum, the longest and the last."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    last_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Record one call."""
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.last_s = seconds

    @property
    def average_s(self) -> float:
        """The average duration; 0 before the first call."""
        return self.total_s / self.count if self.count else 0.0

    @contextmanager
    def measure(self, clock: Clock) -> Iterator[None]:
        """Record the duration of the block, unless it raises."""
        start = clock()
        yield
        self.add(clock() - start)

    def as_dict(self) -> dict[str, float]:
        """Return the durations as `get_lora_metrics` reports them."""
        return {
            "count": self.count,
            "seconds": self.total_s,
            "longest_seconds": self.longest_s,
            "last_seconds": self.last_s,
        }


@dataclass
class ManagerMetrics:
    """The counters of one manager.

    `hits`: an adapter was in a slot when it was used; `misses`: it was not. `evictions`: adapters
    that the policy moved out of a slot or off the host. `switches`: of the active set. `loads`:
    adapters read from files.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    activations: Durations = field(default_factory=Durations)
    switches: Durations = field(default_factory=Durations)
    loads: Durations = field(default_factory=Durations)

    def as_dict(self) -> dict[str, object]:
        """Return the counters as `get_lora_metrics` reports them."""
        return {
            "avg_activation_time": self.activations.average_s,
            "avg_switching_time": self.switches.average_s,
            "activations": self.activations.as_dict(),
            "switches": self.switches.as_dict(),
            "loads": self.loads.as_dict(),
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }
