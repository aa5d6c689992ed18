"""What was done and how long it took, for people who watch.

What it is: counters and durations. What it is not: a decider; nothing reads it but its owner's
metrics. One rule: what failed is not counted as done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Clock = Callable[[], float]
"""Seconds that only grow."""


@dataclass
class Durations:
    """How often something was done, and how long it took: in all, at most, and the last time."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    last_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Once more."""
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.last_s = seconds

    @contextmanager
    def measure(self, clock: Clock) -> Iterator[None]:
        """Count the block, unless it raises."""
        start = clock()
        yield
        self.add(clock() - start)

    def told(self) -> dict[str, float]:
        """As metrics tell it."""
        return {
            "count": self.count,
            "seconds": self.total_s,
            "longest_seconds": self.longest_s,
            "last_seconds": self.last_s,
        }


@dataclass
class Books:
    """`hits`: an adapter was in a slot when it was wanted there; `misses`: it was not.

    `evictions`: adapters that a policy sent out of a slot or off the host. `loads`: files read.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    activations: Durations = field(default_factory=Durations)
    switches: Durations = field(default_factory=Durations)
    loads: Durations = field(default_factory=Durations)

    def told(self) -> dict[str, object]:
        """As metrics tell it."""
        return {
            "activations": self.activations.told(),
            "switches": self.switches.told(),
            "loads": self.loads.told(),
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }
