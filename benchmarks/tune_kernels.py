"""`python -m benchmarks.tune_kernels`: measure tile sizes on this device and rewrite its tables.

For each regime the candidates are timed over batches of that regime, and the best by the geometric
mean of their times is written to `engine/kernels/gpu/tile_configs.py`. The regimes themselves are
fixed. A candidate that does not compile, or whose result is wrong, is rejected.
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
    check_close,
    experts_groups_of,
    experts_layer_of,
    groups_of,
    layer_of,
    microseconds,
)
from benchmarks.gpu_kernels import check
from loradock.engine.kernels import choose_kernels
from loradock.engine.kernels.gpu.operations import TritonOperations
from loradock.engine.kernels.gpu.tile_configs import (
    EXPERTS_CONFIGS,
    LINEAR_CONFIGS,
    LONG,
    SHORT,
    SOURCE,
    ExpandConfig,
    ExpertsConfig,
    FusedConfig,
    LinearConfig,
    ShrinkConfig,
    TileConfigs,
    configs_for,
)

TABLE_FILE: Final = Path(__file__).parent.parent / "engine" / "kernels" / "gpu" / "tile_configs.py"

CELLS: Final[dict[str, tuple[Cell, ...]]] = {
    "few": (Cell(1, 1, (16,), 4096), Cell(4, 4, (16,), 4096)),
    "decode": (Cell(8, 8, (16,), 4096), Cell(32, 32, (8, 64), 4096)),
    "many": (Cell(64, 64, (16,), 4096), Cell(256, 64, (8, 128), 8192)),
    "prefill": (Cell(2048, 8, (16,), 4096), Cell(2048, 64, (64,), 4096)),
    "alone": (Cell(256, 1, (16,), 4096), Cell(2048, 1, (64,), 4096)),
    "invariant": (Cell(8, 8, (16,), 4096), Cell(64, 64, (16,), 4096), Cell(2048, 8, (16,), 4096)),
}
"""The cells on which each regime is tuned."""

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

Launch = ShrinkConfig | ExpandConfig | FusedConfig
AnyConfig = TypeVar("AnyConfig", LinearConfig, ExpertsConfig)


def main() -> int:
    """Tune every regime and write this architecture's tables."""
    if not torch.cuda.is_available():
        print("no CUDA device: the tables are unchanged")
        return 0
    major, minor = capability = torch.cuda.get_device_capability()
    architecture, present = 10 * major + minor, configs_for(capability)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    tuned = {name: tuned_linear(name, one, flush) for name, one in present.linear.items()}
    experts = {name: tuned_experts(name, one, flush) for name, one in present.experts.items()}
    source = f"measured on {torch.cuda.get_device_name()}"
    text = with_tables(
        TABLE_FILE.read_text(),
        LINEAR_CONFIGS | {architecture: tuned},
        EXPERTS_CONFIGS | {architecture: experts},
        SOURCE | {architecture: source},
    )
    TABLE_FILE.write_text(text)
    return 0


def tuned_linear(regime: str, present: LinearConfig, flush: torch.Tensor) -> LinearConfig:
    """Return the fastest launches of a regime, starting from the present ones."""

    def time(config: LinearConfig) -> float:
        operations = TritonOperations(regime == "invariant", TileConfigs({regime: config}, {}))
        works = (_linear_time(cell, operations, flush) for cell in CELLS[regime])
        return mean_of(f"{regime}: {config}", works)

    fields = {field: candidates(regime, field) for field in LinearConfig._fields}
    return best_of(regime, present, fields, time)


def tuned_experts(regime: str, present: ExpertsConfig, flush: torch.Tensor) -> ExpertsConfig:
    """Return the fastest launches of a regime of experts, starting from the present ones."""

    def time(config: ExpertsConfig) -> float:
        operations = TritonOperations(regime == "invariant", TileConfigs({}, {regime: config}))
        works = (_experts_time(cell, operations, flush) for cell in EXPERTS_CELLS[regime])
        return mean_of(f"experts, {regime}: {config}", works)

    fields = {field: candidates(regime, field) for field in ExpertsConfig._fields}
    return best_of(f"experts, {regime}", present, fields, time)


def best_of(
    name: str,
    config: AnyConfig,
    fields: Mapping[str, Iterable[Launch]],
    time: Callable[[AnyConfig], float],
) -> AnyConfig:
    """Return the fastest configuration; launches are varied in turn, with the best others."""
    best, best_time = config, time(config)
    for field, launches in fields.items():
        for launch in launches:
            other = best._replace(**{field: launch})
            other_time = time(other)
            if other_time < best_time:
                best, best_time = other, other_time
    print(f"{name}: {best_time:.1f} us, {best}", flush=True)
    return best


def candidates(regime: str, field: str) -> Iterator[Launch]:
    """Yield the candidates for one launch of a regime."""
    block_m = LONG if regime in ("prefill", "alone") else SHORT
    if field == "shrink":
        for values in product((16, 32, 64), (64, 128, 256), (1, 2, 4, 8, 16), (4, 8), (2, 3, 4)):
            yield ShrinkConfig(block_m, *values)
    elif field == "expand":
        for values in product((64, 128, 256), (16, 32, 64), (4, 8), (1, 2, 3)):
            yield ExpandConfig(block_m, *values)
    elif regime == "few":
        for values in product((64, 128, 256), (16, 32), (64, 128, 256), (4, 8), (2, 3, 4)):
            yield FusedConfig(block_m, *values)


def mean_of(name: str, works: Iterable[float]) -> float:
    """Return the geometric mean of microseconds; infinite if a work can't run or is wrong."""
    try:
        times = list(works)
    except (TritonError, AssertionError) as error:
        print(f"{name} is rejected: {error}", flush=True)
        return float("inf")
    return exp(sum(map(log, times)) / len(times))


def _linear_time(cell: Cell, operations: TritonOperations, flush: torch.Tensor) -> float:
    layer, groups = layer_of(cell, flush.device), groups_of(cell, flush.device)
    x = torch.randn(cell.tokens, cell.hidden, device=flush.device, dtype=DTYPE)
    y = torch.zeros_like(x)
    check(cell, operations.linear, (x, layer, groups))
    return microseconds(lambda: operations.linear(y, x, layer, groups), flush)


def _experts_time(cell: ExpertsCell, operations: TritonOperations, flush: torch.Tensor) -> float:
    layer, groups = experts_layer_of(cell, flush.device), experts_groups_of(cell, flush.device)
    pairs = cell.tokens * cell.top_k
    x = torch.randn(pairs, cell.hidden, device=flush.device, dtype=DTYPE)
    ys = torch.zeros(2, pairs, cell.width, device=flush.device, dtype=DTYPE)
    check_experts(cell, operations.experts, (x, layer, groups))
    return microseconds(lambda: operations.experts([*ys], x, layer, groups), flush)


def check_experts(cell: ExpertsCell, experts, operands) -> None:
    """Raise AssertionError unless the operation's result is that of the reference in float32."""
    x, layer, groups = operands
    found = torch.zeros(2, len(x), cell.width, device=x.device, dtype=DTYPE)
    expected = torch.zeros_like(found, dtype=torch.float32)
    experts([*found], x, layer, groups)
    reference = choose_kernels(x.device.type, "reference")
    reference.experts([*expected], x.float(), layer, groups)
    check_close(cell, found, expected)


def with_tables(
    text: str,
    configs: Mapping[int, Mapping[str, LinearConfig]],
    experts: Mapping[int, Mapping[str, ExpertsConfig]],
    sources: Mapping[int, str],
) -> str:
    """Return the text of `tile_configs.py` with these tables."""
    rows = "".join(f'    {architecture}: "{source}",\n' for architecture, source in sources.items())
    text = _replaced(text, "SOURCE: Final[dict[int, str]]", rows)
    text = _replaced(
        text, "LINEAR_CONFIGS: Final[dict[int, dict[str, LinearConfig]]]", _table(configs)
    )
    return _replaced(
        text, "EXPERTS_CONFIGS: Final[dict[int, dict[str, ExpertsConfig]]]", _table(experts)
    )


def _table(configs: Mapping[int, Mapping[str, AnyConfig]]) -> str:
    """Return the lines of all architectures."""
    return "".join(
        f"    {architecture}: {{\n{''.join(_regime(*item) for item in table.items())}    }},\n"
        for architecture, table in configs.items()
    )


def _regime(name: str, config: LinearConfig | ExpertsConfig) -> str:
    """Return one row; the trailing comma keeps the formatter from joining the lines."""
    launches = "".join(
        f"            {type(launch).__name__}{_arguments(tuple(launch))},\n"
        for launch in config
        if launch is not None
    )
    return f'        "{name}": {type(config).__name__}(\n{launches}        ),\n'


def _arguments(values: tuple[int, ...]) -> str:
    names = {SHORT: "SHORT", LONG: "LONG"}
    return f"({', '.join([names[values[0]], *map(str, values[1:])])})"


def _replaced(text: str, name: str, rows: str) -> str:
    pattern = re.compile(rf"({re.escape(name)} = \{{\n).*?(^\}}\n)", re.DOTALL | re.MULTILINE)
    found, count = pattern.subn(lambda match: match[1] + rows + match[2], text)
    if count != 1:
        raise ValueError(
            f"{TABLE_FILE.name} has {count} tables named {name}; exactly one is needed"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
