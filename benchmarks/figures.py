"""The record of a figure, and timing by process time."""

import time
from collections.abc import Callable

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One measured number and its yardstick, from the same run.

    `ratio` is the value divided by the yardstick, or the other way round where larger is better.
    `target` is what the project requires, and `reached` whether this run met it.
    """

    name: str
    value: float
    unit: str
    yardstick: str
    ratio: float
    target: str
    reached: bool


def best_seconds(work: Callable[[], None], rounds: int = 5) -> float:
    """Return the shortest of `rounds` runs, in seconds of process time.

    For single-threaded work that does not wait: process time excludes other processes, and noise
    only adds, so the shortest run is the most exact.
    """
    return min(_seconds(work) for _ in range(rounds))


def _seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def interleave(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[float]:
    """Run two measurements alternately, and return the median of each."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*pairs, strict=True)]
