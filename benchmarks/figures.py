"""What a figure is, and how things are timed.

What it is: the record that `results.json` keeps, and two clocks. What it is not: a measurement. One
rule: the best of several rounds is taken, for noise only ever adds.
"""

import time
from collections.abc import Callable

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One measured number beside its yardstick, from the same run.

    `ratio` is value over yardstick. `reach` says what the project aims at, and `reached` whether
    this run got there; the last two are not part of the published list.
    """

    name: str
    value: float
    unit: str
    yardstick: str
    ratio: float
    reach: str
    reached: bool


def best_seconds(work: Callable[[], None], rounds: int = 5) -> float:
    """The shortest of `rounds` runs, in seconds of this process's own time.

    For work of one thread that waits for nothing: neighbours on the machine count less.
    """
    return min(_seconds(work) for _ in range(rounds))


def _seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def in_turns(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[float]:
    """The median of each of two measurements that alternate."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*pairs, strict=True)]
