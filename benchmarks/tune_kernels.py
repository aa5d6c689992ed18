"""`python -m benchmarks.tune_kernels`: measure tile sizes on this device and write its table.

What it is: for each regime, the candidates timed over batches of that regime, and the best by the
geometric mean of their times; the table goes into `engine/kernels/gpu/plans.py`. What it is not:
run while serving, or able to change which regimes there are. One rule: a candidate that does not
compile, or gives a wrong result, is no candidate.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Final

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from benchmarks.device_layers import DTYPE, FLUSH_BYTES, Cell, groups_of, layer_of, microseconds
from benchmarks.gpu_kernels import check
from engine.kernels.gpu.kernels import TritonOperations
from engine.kernels.gpu.plans import (
    LONG,
    PLANS,
    REGIMES,
    SHORT,
    SOURCE,
    ExpandPlan,
    FusedPlan,
    Plan,
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


def main() -> int:
    """Tune every regime and write this architecture's rows."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: the table keeps its values")
        return 0
    major, minor = torch.cuda.get_device_capability()
    architecture = max((a for a in PLANS if a <= 10 * major + minor), default=min(PLANS))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    tuned = {regime: best_of(regime, architecture, flush) for regime in REGIMES}
    source = f"measured on {torch.cuda.get_device_name()}"
    text = TABLE_FILE.read_text()
    text = with_table(text, PLANS | {architecture: tuned}, SOURCE | {architecture: source})
    TABLE_FILE.write_text(text)
    return 0


def best_of(regime: str, architecture: int, flush: torch.Tensor) -> Plan:
    """The fastest plan; shrink and expand are varied in turn, each beside the best other."""
    best = PLANS[architecture][regime]
    best_time = time_of(regime, best, flush)
    for field in ("shrink", "expand", "fused"):
        for launch in candidates(regime, field):
            plan = best._replace(**{field: launch})
            time = time_of(regime, plan, flush)
            if time < best_time:
                best, best_time = plan, time
    print(f"{regime}: {best_time:.1f} us, {best}", flush=True)
    return best


def candidates(regime: str, field: str) -> Iterator[ShrinkPlan | ExpandPlan | FusedPlan]:
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


def time_of(regime: str, plan: Plan, flush: torch.Tensor) -> float:
    """The geometric mean over the regime's cells in microseconds; infinite where it can't run."""
    operations = TritonOperations(regime == "invariant", {regime: plan})
    try:
        times = [_cell_time(cell, operations, flush) for cell in CELLS[regime]]
    except (OutOfResources, CompilationError, AssertionError) as error:
        print(f"{regime}: {plan} is out: {error}", flush=True)
        return float("inf")
    return exp(sum(map(log, times)) / len(times))


def _cell_time(cell: Cell, operations: TritonOperations, flush: torch.Tensor) -> float:
    layer = layer_of(cell, flush.device)
    groups = groups_of(cell, flush.device, max(cell.ranks))
    x = torch.randn(cell.tokens, cell.hidden, device=flush.device, dtype=DTYPE)
    y = torch.zeros_like(x)
    check(cell, operations.linear, (x, layer, groups))
    return microseconds(lambda: operations.linear(y, x, layer, groups, 1.0), flush)


def with_table(
    text: str, plans: Mapping[int, Mapping[str, Plan]], sources: Mapping[int, str]
) -> str:
    """The text of `plans.py` with these tables in the place of its own."""
    rows = "".join(f'    {architecture}: "{words}",\n' for architecture, words in sources.items())
    text = _replaced(text, "SOURCE: Final[dict[int, str]]", rows)
    tables = "".join(
        f"    {architecture}: {{\n{''.join(_regime(*item) for item in table.items())}    }},\n"
        for architecture, table in plans.items()
    )
    return _replaced(text, "PLANS: Final[dict[int, dict[str, Plan]]]", tables)


def _regime(name: str, plan: Plan) -> str:
    """One row; the comma at its end keeps the formatter from joining the lines."""
    launches = "".join(
        f"            {type(launch).__name__}{_in_words(tuple(launch))},\n"
        for launch in plan
        if launch is not None
    )
    return f'        "{name}": Plan(\n{launches}        ),\n'


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
