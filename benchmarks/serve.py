"""The figures `serve.*`: an engine under load. One function per figure, listed in `FIGURES`.

`python -m benchmarks.serve --small` prints them for a small model, without storing anything.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Final

from rich.console import Console

from benchmarks.figures import Figure
from benchmarks.serve_load import ADAPTERS, SHAPE, SMALL, Load, ServedEngine, Shape, served_engine
from messages.prompts import Sampling

ROUNDS: Final = 5
LOGPROBS: Final = 5
_MIXED: Final = tuple(range(1, ADAPTERS + 1))


def logprobs(engine: ServedEngine) -> Figure:
    """Return `serve.logprobs`: tokens/s with log-probabilities, against the same without."""
    without = partial(engine.run, _MIXED, Sampling())
    scored = partial(engine.run, _MIXED, Sampling(logprobs=LOGPROBS))
    ratio, rate, base = _compare(scored, without)
    return Figure(
        "serve.logprobs",
        rate,
        f"tokens/s with {LOGPROBS} log-probabilities per token",
        f"none: {base:.1f} tokens/s",
        ratio,
        "ratio >= 0.9",
        ratio >= 0.9,
    )


FIGURES: Final[tuple[Callable[[ServedEngine], Figure], ...]] = (logprobs,)


def run(shape: Shape = SHAPE) -> Iterator[Figure]:
    """Measure every figure of the group on one engine."""
    with served_engine(shape) as engine:
        engine.run(_MIXED, Sampling())
        for figure in FIGURES:
            yield figure(engine)


def _compare(first: Callable[[], Load], second: Callable[[], Load]) -> tuple[float, float, float]:
    """Return the median ratio of the rates of alternating runs, and the median rate of each.

    Two rates are compared within a round only: the machine's speed drifts between rounds.
    """
    ratios, rates = [], []
    for number in range(ROUNDS):
        # The order alternates, so that neither always follows the other.
        order = (first, second) if number % 2 else (second, first)
        found = {work: work().tokens_per_s for work in order}
        ratios.append(found[first] / found[second])
        rates.append((found[first], found[second]))
    own, other = (median(column) for column in zip(*rates, strict=True))
    return median(ratios), own, other


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Measure an engine under load.")
    parser.add_argument("--small", action="store_true", help="a small model, for a first look")
    small = parser.parse_args().small
    for figure in run(SMALL if small else SHAPE):
        Console(width=150).print(figure)


if __name__ == "__main__":
    main()
