"""A histogram whose observations cost one search and two additions."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final


class Histogram:
    """Counts of observations per bucket; `bounds` are inclusive upper bounds, ascending."""

    def __init__(
        self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0
    ) -> None:
        """`counts` are observations made elsewhere, one per bucket, of the sum `total`."""
        self.bounds: Final = tuple(bounds)
        self._counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.sum = total

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations up to it) as the text format needs them."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return found
