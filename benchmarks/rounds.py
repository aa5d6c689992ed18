"""Interleaved timing of several works, and the ratios of their times.

Two times are compared only within one round, and a ratio is the median over the rounds. A machine's
speed drifts, with its clock and with other processes' use of caches and memory, so the best samples
of two works may come from a fast and a slow period. Within a round both have the same period, so
the drift cancels; and the median ignores a single sample with an interrupt. A work's time against
the best of several rivals is its worst median ratio over them; the minimum of several noisy
samples, taken per round, would be biased downward.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from statistics import median
from typing import Final, NamedTuple

import torch

Work = Callable[[], object]

SAMPLE_SECONDS: Final = 1e-3
"""The least duration of a sample, which hides the resolution of the clocks."""
SLOW_SECONDS: Final = 0.05
"""A work that takes longer needs no untimed run before its sample."""
ROUNDS_MIN: Final = 3
ROUNDS_MAX: Final = 61


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch use `count` threads.

    Process time is only comparable with one: the others spin while one runs Python.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Sample(NamedTuple):
    """The seconds of one run, in process time and in wall time."""

    own: float
    wall: float


class Rounds:
    """The samples of each work, one per round."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self._samples = samples

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the works."""
        return tuple(self._samples)

    def __contains__(self, name: str) -> bool:
        """Whether a work of this name was timed."""
        return name in self._samples

    def microseconds(self, name: str) -> float:
        """Return a work's median process time."""
        return 1e6 * median(sample.own for sample in self._samples[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the median ratio of the process times of `name` and `other`."""
        pairs = zip(self._samples[name], self._samples[other], strict=True)
        return median(own.own / others.own for own, others in pairs)

    def wall_ratio(self, name: str, other: str) -> float:
        """Return the median ratio of their wall times, which include other processes' work."""
        pairs = zip(self._samples[name], self._samples[other], strict=True)
        return median(own.wall / others.wall for own, others in pairs)


def interleave(works: Mapping[str, Work], seconds: float) -> Rounds:
    """Time the works alternately, round by round, for about `seconds` in total.

    Every round has a different random order, so that no work always follows the same one. Before
    its sample a work runs untimed, so that its time does not include cache misses caused by the
    previous work.
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
    """Estimate the duration of a run; a quick work is run once before, for its preparation."""
    first = _seconds(work, 1).own
    return first if first > SLOW_SECONDS else _seconds(work, 2).own


def _untimed(repeats: int, seconds: float) -> int:
    """Return the number of runs before a sample; a slow work fills the caches by itself."""
    return 0 if seconds > SLOW_SECONDS else max(1, repeats // 2)


def _seconds(work: Work, repeats: int) -> Sample:
    """Return the average times of one run."""
    own, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        work()
    own, wall = time.process_time() - own, time.perf_counter() - wall
    return Sample(own / repeats, wall / repeats)
