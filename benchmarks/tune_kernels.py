"""`python -m benchmarks.tune_kernels`: measure tile sizes on this device and write its tables.

What it is: for each regime, the candidates timed over batches of that regime, and the best by the
geometric mean of their times; the tables go into `engine/kernels/gpu/tile_configs.py`. What it is
not: run while serving, or able to change which regimes there are. One rule: a candidate that does
not compile, or gives a wrong result, is no candidate.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Final, TypeVar

import torch
from triton.errors import TritonError

from benchmarks.device_layers import (
    DTYPE,
    FLUSH_BYTES,
    Cell,
    ExpertsCell,
    experts_groups_of,
    experts_layer_of,
    groups_of,
    layer_of,
    microseconds,
    same,
)
from benchmarks.gpu_kernels import check
from engine.kernels import choose_kernels
from engine.kernels.gpu.operations import TritonOperations
from engine.kernels.gpu.tile_configs import (
    EXPERTS,
    EXPERTS_REGIMES,
    LONG,
    PLANS,
    REGIMES,
    SHORT,
    SOURCE,
    ExpandPlan,
    ExpertsPlan,
    FusedPlan,
    Plan,
    Plans,
    ShrinkPlan,
)

TABLE_FILE: Final = Path(__file__).parent.parent / "engine" / "kernels" / "gpu" / "plans.py"

CELLS: Final[dict[str, tuple[Cell, ...]]] = {
    "few": (Cell(1, 1, (16,), 4096), Cell(4, 4, (16,), 4096)),
    "decode": (Cell(8, 8, (16,), 4096), Cell(32, 32, (8, 64), 4096)),
    "many": (Cell(64, 64, (16,), 4096), Cell(256, 64, (8, 128), 8192)),
    "prefill": (Cell(2048, 8, (16,), 4096), Cell(2048, 64, (64,), 4096)),
    "alone": (Cell(256, 1, (16,), 4096), Cell(2048, 1, (64,), 4096)),
    "invariant": (Cell(8, 8, (16,), 4096), Cell(64, 64, (16,), 4096), Cell(2048, 8, (16,), 4096)),
}
"""What each regime is tuned on."""

EXPERTS_CELLS: Final[dict[str, tuple[ExpertsCell, ...]]] = {
    "decode": (ExpertsCell(16, 8, 8, 64, 8, 2048, 1024), ExpertsCell(64, 32, 16, 8, 2, 4096, 2048)),
    "prefill": (
        ExpertsCell(2048, 1, 8, 64, 8, 2048, 1024),
        ExpertsCell(2048, 4, 16, 8, 2, 4096, 2048),
    ),
    "invariant": (
        ExpertsCell(16, 8, 8, 64, 8, 2048, 1024),
        ExpertsCell(2048, 4, 16, 8, 2, 4096, 2048),
    ),
}
"""The same for experts: many narrow ones, and few wide ones."""

Launch = ShrinkPlan | ExpandPlan | FusedPlan
AnyPlan = TypeVar("AnyPlan", Plan, ExpertsPlan)


def main() -> int:
    """Tune every regime and write this architecture's rows."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: the tables keep their values")
        return 0
    major, minor = torch.cuda.get_device_capability()
    architecture = max((a for a in PLANS if a <= 10 * major + minor), default=min(PLANS))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    tuned = {regime: tuned_plan(regime, architecture, flush) for regime in REGIMES}
    experts = {regime: tuned_experts(regime, architecture, flush) for regime in EXPERTS_REGIMES}
    source = f"measured on {torch.cuda.get_device_name()}"
    text = with_tables(
        TABLE_FILE.read_text(),
        PLANS | {architecture: tuned},
        EXPERTS | {architecture: experts},
        SOURCE | {architecture: source},
    )
    TABLE_FILE.write_text(text)
    return 0


def tuned_plan(regime: str, architecture: int, flush: torch.Tensor) -> Plan:
    """The fastest launches of a regime."""

    def time(plan: Plan) -> float:
        operations = TritonOperations(regime == "invariant", Plans({regime: plan}, {}))
        works = (_linear_time(cell, operations, flush) for cell in CELLS[regime])
        return mean_of(f"{regime}: {plan}", works)

    fields = {field: candidates(regime, field) for field in Plan._fields}
    return best_of(regime, PLANS[architecture][regime], fields, time)


def tuned_experts(regime: str, architecture: int, flush: torch.Tensor) -> ExpertsPlan:
    """The fastest launches of a regime of experts."""

    def time(plan: ExpertsPlan) -> float:
        operations = TritonOperations(regime == "invariant", Plans({}, {regime: plan}))
        works = (_experts_time(cell, operations, flush) for cell in EXPERTS_CELLS[regime])
        return mean_of(f"experts, {regime}: {plan}", works)

    fields = {field: candidates(regime, field) for field in ExpertsPlan._fields}
    return best_of(f"experts, {regime}", EXPERTS[architecture][regime], fields, time)


def best_of(
    name: str,
    plan: AnyPlan,
    fields: Mapping[str, Iterable[Launch]],
    time: Callable[[AnyPlan], float],
) -> AnyPlan:
    """The fastest plan; launches are varied in turn, each beside the best others."""
    best, best_time = plan, time(plan)
    for field, launches in fields.items():
        for launch in launches:
            other = best._replace(**{field: launch})
            other_time = time(other)
            if other_time < best_time:
                best, best_time = other, other_time
    print(f"{name}: {best_time:.1f} us, {best}", flush=True)
    return best


def candidates(regime: str, field: str) -> Iterator[Launch]:
    """What is tried for one launch of a regime."""
    height = LONG if regime in ("prefill", "alone") else SHORT
    if field == "shrink":
        for values in product((16, 32, 64), (64, 128, 256), (1, 2, 4, 8, 16), (4, 8), (2, 3, 4)):
            yield ShrinkPlan(height, *values)
    elif field == "expand":
        for values in product((64, 128, 256), (16, 32, 64), (4, 8), (1, 2, 3)):
            yield ExpandPlan(height, *values)
    elif regime == "few":
        for values in product((64, 128, 256), (16, 32), (64, 128, 256), (4, 8), (2, 3, 4)):
            yield FusedPlan(height, *values)


def mean_of(name: str, works: Iterable[float]) -> float:
    """The geometric mean of microseconds; infinite where one of the works can't run or is wrong."""
    try:
        times = list(works)
    except (TritonError, AssertionError) as error:
        print(f"{name} is out: {error}", flush=True)
        return float("inf")
    return exp(sum(map(log, times)) / len(times))


def _linear_time(cell: Cell, operations: TritonOperations, flush: torch.Tensor) -> float:
    layer, groups = layer_of(cell, flush.device), groups_of(cell, flush.device)
    x = torch.randn(cell.tokens, cell.hidden, device=flush.device, dtype=DTYPE)
    y = torch.zeros_like(x)
    check(cell, operations.linear, (x, layer, groups))
    return microseconds(lambda: operations.linear(y, x, layer, groups, 1.0), flush)


def _experts_time(cell: ExpertsCell, operations: TritonOperations, flush: torch.Tensor) -> float:
    layer, groups = experts_layer_of(cell, flush.device), experts_groups_of(cell, flush.device)
    pairs = cell.tokens * cell.top_k
    x = torch.randn(pairs, cell.hidden, device=flush.device, dtype=DTYPE)
    ys = torch.zeros(2, pairs, cell.width, device=flush.device, dtype=DTYPE)
    check_experts(cell, operations.experts, (x, layer, groups))
    return microseconds(lambda: operations.experts([*ys], x, layer, groups), flush)


def check_experts(cell: ExpertsCell, experts, operands) -> None:
    """Raise AssertionError unless the operation gives what the reference gives in float32."""
    x, layer, groups = operands
    found = torch.zeros(2, len(x), cell.width, device=x.device, dtype=DTYPE)
    expected = torch.zeros_like(found, dtype=torch.float32)
    experts([*found], x, layer, groups)
    reference = choose_kernels(x.device.type, "reference")
    reference.experts([*expected], x.float(), layer, groups)
    same(cell, found, expected)


def with_tables(
    text: str,
    plans: Mapping[int, Mapping[str, Plan]],
    experts: Mapping[int, Mapping[str, ExpertsPlan]],
    sources: Mapping[int, str],
) -> str:
    """The text of `plans.py` with these tables in the place of its own."""
    rows = "".join(f'    {architecture}: "{words}",\n' for architecture, words in sources.items())
    text = _replaced(text, "SOURCE: Final[dict[int, str]]", rows)
    text = _replaced(text, "PLANS: Final[dict[int, dict[str, Plan]]]", _table(plans))
    return _replaced(text, "EXPERTS: Final[dict[int, dict[str, ExpertsPlan]]]", _table(experts))


def _table(plans: Mapping[int, Mapping[str, AnyPlan]]) -> str:
    """The lines of all architectures."""
    return "".join(
        f"    {architecture}: {{\n{''.join(_regime(*item) for item in table.items())}    }},\n"
        for architecture, table in plans.items()
    )


def _regime(name: str, plan: Plan | ExpertsPlan) -> str:
    """One row; the comma at its end keeps the formatter from joining the lines."""
    launches = "".join(
        f"            {type(launch).__name__}{_in_words(tuple(launch))},\n"
        for launch in plan
        if launch is not None
    )
    return f'        "{name}": {type(plan).__name__}(\n{launches}        ),\n'


def _in_words(values: tuple[int, ...]) -> str:
    heights = {SHORT: "SHORT", LONG: "LONG"}
    return f"({', '.join([heights[values[0]], *map(str, values[1:])])})"


def _replaced(text: str, name: str, rows: str) -> str:
    pattern = re.compile(rf"({re.escape(name)} = \{{\n).*?(^\}}\n)", re.DOTALL | re.MULTILINE)
    found, count = pattern.subn(lambda match: match[1] + rows + match[2], text)
    if count != 1:
        raise ValueError(f"{TABLE_FILE.name} has {count} tables called {name}; one is needed")
    return found


if __name__ == "__main__":
    sys.exit(main())
