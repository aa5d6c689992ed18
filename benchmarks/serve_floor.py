"""The figure `serve.vs_floor`: a step of the engine against its products and attention alone.

The calls of one decode step that multiply with a weight or attend are recorded with their operands,
and repeated without the engine: nothing that computes the same outputs from the same weights with
these libraries takes less time.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figures import Figure
from benchmarks.serve_engine import ServedEngine, served_engine
from benchmarks.serve_load import ADAPTERS, RANK, Prompt, Prompts, Shape
from loradock.messages.prompts import Sampling

ROWS: Final = (8, 32)
FLOOR_MAX: Final = 1.35
PROMPT_TOKENS: Final = 100
_STEPS: Final = 12
_ROUNDS: Final = 5
_FLOOR_CALLS: Final = ("_linear_pointwise", "aten::mm", "aten::addmm", "aten::bmm", "attention")
"""Parts of the names of the calls that count."""


class Step(NamedTuple):
    """The seconds of a decode step, and those of its products and attention alone."""

    whole_s: float
    floor_s: float

    @property
    def ratio(self) -> float:
        """How many times as long the step takes."""
        return self.whole_s / self.floor_s


def vs_floor(root: Path, shape: Shape, prompts: Prompts) -> Figure:
    """Return the worst ratio of steps of the base model, and in words those with adapters."""
    with served_engine(root, shape, RANK, clients=max(ROWS)) as engine:
        base = {rows: _step(engine, prompts, [None], rows) for rows in ROWS}
        mixed = {rows: _step(engine, prompts, range(ADAPTERS), rows) for rows in ROWS}
    worst = max(base.values(), key=lambda step: step.ratio)
    texts = [
        f"{rows} rows {1e3 * step.whole_s:.1f} : {1e3 * step.floor_s:.1f} ms"
        for rows, step in base.items()
    ]
    others = [f"{rows} rows {step.ratio:.2f}" for rows, step in mixed.items()]
    return Figure(
        "serve.vs_floor", 1e3 * worst.whole_s, "ms a step of the base model",
        f"its products and attention alone: {', '.join(texts)}; "
        f"{ADAPTERS} adapters, whose products count: {', '.join(others)}",
        worst.ratio, f"ratio <= {FLOOR_MAX:g}", worst.ratio <= FLOOR_MAX,
    )  # fmt: skip


def _step(
    engine: ServedEngine, prompts: Prompts, adapters: Sequence[int | None], rows: int
) -> Step:
    """Measure steps of as many running rows, in turn with their repeated calls."""
    # The last prompts begin some steps after the first.
    lasting = Sampling(max_tokens=_ROUNDS * (_STEPS + 1) + rows, ignore_eos=True)
    running = [
        engine.generate(
            Prompt(adapters[row % len(adapters)], prompts.of_length(PROMPT_TOKENS)), lasting
        )
        for row in range(rows)
    ]
    while not all(map(engine.has_started, running)):
        engine.advance()
    found = []
    for _ in range(_ROUNDS):
        whole_s = _seconds(engine.advance, _STEPS)
        with _Recorded() as recorded:
            engine.advance()
        found.append(Step(whole_s, _seconds(recorded.repeat, _STEPS)))
    engine.drain()
    return Step(median(s.whole_s for s in found), median(s.floor_s for s in found))


def _seconds(work: Callable[[], None], count: int) -> float:
    started = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - started) / count


class _Recorded(TorchDispatchMode):
    """Records the calls that count, with their operands as they are after the step."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if any(part in func._schema.name for part in _FLOOR_CALLS):
            self._calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def repeat(self) -> None:
        """Make the calls again; their results are dropped."""
        with torch.inference_mode():
            for call, args, kwargs in self._calls:
                call(*args, **kwargs)
