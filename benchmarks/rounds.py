"""Works timed in turns, and how long one takes for each other.

What it is: a round robin of short samples by two clocks, and the median of the rounds' ratios. What
it is not: a choice of what is compared. One rule: two times are set against each other only where
they come from the same round.

Why the median of ratios, and not a ratio of the best times: a machine's speed drifts (its clock,
and what neighbours leave of cache and memory), and the best samples of two works may be from a fast
and a slow spell. Within a round both meet the same spell, so it cancels; and the odd sample that an
interrupt hit is no median. A work's time against the best of several rivals is its worst median
ratio over them; the least of several noisy samples, taken round by round, would be biased downward.
"""

import time
from collections.abc import Callable, Mapping
from random import Random
from statistics import median
from typing import Final, NamedTuple

Work = Callable[[], object]

SAMPLE_SECONDS: Final = 1e-3
"""How long one sample lasts at least, so that the clocks' steps don't show."""
SLOW_SECONDS: Final = 0.05
"""A work that takes longer needs no run before its sample."""
ROUNDS_MIN: Final = 3
ROUNDS_MAX: Final = 61


class Sample(NamedTuple):
    """One run's seconds, by this process's own time and by the clock on the wall."""

    own: float
    wall: float


class Rounds:
    """What each work took in each round."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self._samples = samples

    @property
    def names(self) -> tuple[str, ...]:
        """The works' names."""
        return tuple(self._samples)

    def __contains__(self, name: str) -> bool:
        """Whether a work of this name was timed."""
        return name in self._samples

    def microseconds(self, name: str) -> float:
        """A work's median in this process's own time."""
        return 1e6 * median(sample.own for sample in self._samples[name])

    def ratio(self, name: str, other: str) -> float:
        """How many times as much of the process's own time as `other` a work takes."""
        pairs = zip(self._samples[name], self._samples[other], strict=True)
        return median(own.own / others.own for own, others in pairs)

    def wall_ratio(self, name: str, other: str) -> float:
        """The same by the clock on the wall, which a busy machine's other work runs through too."""
        pairs = zip(self._samples[name], self._samples[other], strict=True)
        return median(own.wall / others.wall for own, others in pairs)


def in_turns(works: Mapping[str, Work], seconds: float) -> Rounds:
    """Time the works one after the other, round by round, for about `seconds` altogether.

    Each round has another order, so that nobody always follows the same neighbour, and before its
    sample a work runs untimed, so that it does not pay for what that neighbour left in the caches.
    """
    first = {name: _first_seconds(work) for name, work in works.items()}
    repeats = {name: max(1, int(SAMPLE_SECONDS / max(first[name], 1e-6))) for name in works}
    untimed = {name: _untimed(repeats[name], first[name]) for name in works}
    round_seconds = sum((untimed[name] + repeats[name]) * first[name] for name in works)
    samples: dict[str, list[Sample]] = {name: [] for name in works}
    order, random = list(works), Random(0)  # noqa: S311
    for _ in range(min(ROUNDS_MAX, max(ROUNDS_MIN, int(seconds / round_seconds)))):
        random.shuffle(order)
        for name in order:
            for _ in range(untimed[name]):
                works[name]()
            samples[name].append(_seconds(works[name], repeats[name]))
    return Rounds(samples)


def _first_seconds(work: Work) -> float:
    """About how long a run takes; a quick work is run once before, for it makes plans first."""
    first = _seconds(work, 1).own
    return first if first > SLOW_SECONDS else _seconds(work, 2).own


def _untimed(repeats: int, seconds: float) -> int:
    """How many runs come before a sample; a slow work fills the caches by itself."""
    return 0 if seconds > SLOW_SECONDS else max(1, repeats // 2)


def _seconds(work: Work, repeats: int) -> Sample:
    """What one run takes, on the average of some."""
    own, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        work()
    own, wall = time.process_time() - own, time.perf_counter() - wall
    return Sample(own / repeats, wall / repeats)
