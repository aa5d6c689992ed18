"""How long an engine takes: fits of a log's reports by least squares, and draws from them.

An operation on an adapter takes a fixed time and a time per byte, plus a residual of the fit. A
generation takes a time for its prompt, then a step per token, whose time depends on the running
sequences, their distinct adapters and the ranks of these.
"""

import random
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

_RIDGE: Final = 1e-9
_RESIDUALS_MAX: Final = 4096


class Line(Struct, frozen=True):
    """A duration by size: `fixed_ns + size * per_unit_ns` plus one of `residuals_ns`."""

    fixed_ns: float = 0.0
    per_unit_ns: float = 0.0
    least_ns: float = 0.0
    residuals_ns: tuple[float, ...] = (0.0,)

    def draw(self, size: int, generator: random.Random, speed: float = 1.0) -> int:
        """Return a duration; `speed` divides it."""
        mean = self.fixed_ns + size * self.per_unit_ns
        drawn = mean + generator.choice(self.residuals_ns)
        return int(max(self.least_ns, drawn) / speed)


class Step(Struct, frozen=True):
    """The times of prompts and of forward passes, in nanoseconds."""

    prompt_fixed_ns: float = 0.0
    prompt_token_ns: float = 0.0
    fixed_ns: float = 0.0
    row_ns: float = 0.0
    adapter_ns: float = 0.0
    rank_ns: float = 0.0

    def prompt_ns(self, tokens: int) -> int:
        """Return the time until a generation takes part in steps."""
        return int(self.prompt_fixed_ns + tokens * self.prompt_token_ns)

    def step_ns(self, rows: int, adapters: int, ranks: int) -> float:
        """Return the time of one forward pass; `ranks` is the sum of the adapters' ranks."""
        taken = self.fixed_ns + rows * self.row_ns + adapters * self.adapter_ns
        return max(1.0, taken + ranks * self.rank_ns)


class Service(Struct, frozen=True):
    """An engine's durations: of operations by the name of their command, and of inference."""

    operations: dict[str, Line] = {}
    step: Step = Step()
    pooling: Line = Line()

    def draw(
        self, command: str, size_bytes: int, generator: random.Random, speed: float = 1.0
    ) -> int:
        """Return the duration of an operation; 0 for a kind that was never seen."""
        line = self.operations.get(command)
        return 0 if line is None else line.draw(size_bytes, generator, speed)


def fit_line(samples: Sequence[tuple[int, int]]) -> Line:
    """Fit durations to sizes; `samples` are (size, duration in nanoseconds)."""
    if not samples:
        return Line()
    fixed, slope = least_squares([(1.0, float(size)) for size, _ in samples], _durations(samples))
    kept = samples[:: 1 + len(samples) // _RESIDUALS_MAX]
    residuals = tuple([duration - fixed - size * slope for size, duration in kept])
    return Line(fixed, slope, float(min(_durations(samples))), residuals)


def _durations(samples: Sequence[tuple[int, int]]) -> list[float]:
    return [float(duration) for _, duration in samples]


def least_squares(rows: Sequence[tuple[float, ...]], targets: Sequence[float]) -> list[float]:
    """Return the coefficients of the least squares that are not negative.

    A coefficient that would be negative is 0, and the others are fitted without it. The normal
    equations have a ridge, so columns that depend on each other share their weight.
    """
    count = len(rows[0])
    used = list(range(count))
    while used:
        found = _solved([[row[place] for place in used] for row in rows], targets)
        lowest = min(found)
        if lowest >= 0:
            return _spread(used, found, count)
        del used[found.index(lowest)]
    return [0.0] * count


def _spread(used: list[int], values: list[float], count: int) -> list[float]:
    found = dict(zip(used, values, strict=True))
    return [found.get(place, 0.0) for place in range(count)]


def _solved(rows: list[list[float]], targets: Sequence[float]) -> list[float]:
    """Solve the normal equations by Gaussian elimination, with columns scaled to their size."""
    count = len(rows[0])
    scales = [max(abs(row[place]) for row in rows) or 1.0 for place in range(count)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [
            *(sum(row[i] * row[j] for row in scaled) for j in range(count)),
            sum(row[i] * target for row, target in zip(scaled, targets, strict=True)),
        ]
        for i in range(count)
    ]
    for place in range(count):
        matrix[place][place] += _RIDGE * len(rows)
    for place in range(count):
        pivot = max(range(place, count), key=lambda i: abs(matrix[i][place]))
        matrix[place], matrix[pivot] = matrix[pivot], matrix[place]
        for i in range(count):
            if i != place and matrix[place][place]:
                factor = matrix[i][place] / matrix[place][place]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[place], strict=True)]
    solved = [matrix[i][count] / (matrix[i][i] or 1.0) for i in range(count)]
    return [value / scale for value, scale in zip(solved, scales, strict=True)]
