"""Constants of this machine: a `CostTable`, and the speed of products in each dtype.

They are measured once, in less than a second on one thread, and stored in the user's cache
directory by the processor's name and the library's version. A file that can't be read is measured
again, and one that can't be written is not stored.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.kernels.cpu.base_linear import has_onednn, onednn_linear
from engine.kernels.cpu.costs import DEFAULT_COSTS, CostTable, DtypeCosts, ProductCost
from engine.kernels.threads import threads_for

CALIBRATED_BYTES_MIN: Final = 64 << 20
"""The least weights of a model for which a machine is measured."""

FASTER_MIN: Final = 1.5
"""How many times as fast float32 products must be, because its weights take twice the memory."""

ONEDNN_MIN: Final = 1.2
"""How many times as fast oneDNN must be to be used."""

_FORMAT: Final = 2
_SAMPLE_S: Final = 2e-3
_SAMPLES: Final = 5
_PARTS: Final = 8
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_RANK: Final = 16
_ROWS: Final = (2, 16)
_WIDTHS: Final = (512, 4096)
"""Rows per part and columns for which products are timed."""
_CALL_MIN: Final = 0.5
_CONVERTED: Final = (16, 1 << 18)
_MODEL_WIDTH: Final = 1024
_MODEL_ROWS: Final = (16, 128)


class ProductSpeeds(NamedTuple):
    """Microseconds of a model's own product, by dtype; `onednn`: in float32 by `onednn_linear`."""

    float32: float
    bfloat16: float
    float16: float
    onednn: float

    @property
    def uses_onednn(self) -> bool:
        """Whether float32 products are computed by `onednn_linear`."""
        return self.float32 >= ONEDNN_MIN * self.onednn


class Calibration(NamedTuple):
    """What is measured of a machine."""

    costs: CostTable
    products: ProductSpeeds


def calibration(directory: Path | None = None) -> Calibration:
    """Return this machine's constants: stored ones, or measured and then stored.

    `directory`: where they are stored; None for the user's cache directory.
    """
    path = (directory or _cache_directory()) / f"cpu-{_machine_key()}.json"
    try:
        return _decoded(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        measured = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(_numbers(measured)))
        temporary.replace(path)
    except OSError:
        # Then the constants are measured at every start.
        return measured
    return measured


def faster_dtype(saved: torch.dtype, products: ProductSpeeds) -> torch.dtype:
    """Return float32 where a model's products are much faster in it than in the saved dtype.

    Weights are never rounded: a model that was saved in float32 remains so.
    """
    own = products._asdict().get(str(saved).removeprefix("torch."), 0.0)
    wide = products.onednn if products.uses_onednn else products.float32
    return torch.float32 if own >= FASTER_MIN * wide else saved


def measure() -> Calibration:
    """Measure the constants on one thread."""
    with threads_for(1), torch.inference_mode():
        convert_call, convert_element = _line(_conversion, _CONVERTED)
        costs = CostTable(
            _dtype_costs(torch.float32), _dtype_costs(torch.bfloat16), convert_call, convert_element
        )
        float32, bfloat16, float16 = (_model_product(dtype, linear) for dtype in _DTYPES)
        # Without the operation it counts as equally fast, and is not used.
        onednn = _model_product(torch.float32, onednn_linear) if has_onednn() else float32
        return Calibration(costs, ProductSpeeds(float32, bfloat16, float16, onednn))


def _dtype_costs(dtype: torch.dtype) -> DtypeCosts:
    stacked = torch.randn(_PARTS, _RANK, _WIDTHS[1]).to(dtype)
    columns = stacked.mT.contiguous()
    elements = stacked.numel()
    flat_a, flat_b = (torch.empty(elements, dtype=dtype) for _ in range(2))
    a, b = flat_a.view(stacked.shape), flat_b.view(_WIDTHS[1], -1)
    sources = list(stacked), list(columns)
    return DtypeCosts(
        grouped=(_product_cost(dtype, 1, _shrink), _product_cost(dtype, 1, _expand)),
        dense=(_product_cost(dtype, 1, _shrink, _PARTS), _product_cost(dtype, 1, _expand, _PARTS)),
        batched=(_product_cost(dtype, _PARTS, _shrink), _product_cost(dtype, _PARTS, _expand)),
        stack=_microseconds(lambda: torch.stack(sources[0], out=a)) / elements,
        concatenate=_microseconds(lambda: torch.cat(sources[1], 1, out=b)) / elements,
    )


def _shrink(parts: int, rows: int, rank: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the operands of a first product, the weights transposed."""
    return (parts, rows, width), (parts, rank, width)


def _expand(parts: int, rows: int, rank: int, width: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the operands of a second product, the weights transposed."""
    return (parts, rows, rank), (parts, width, rank)


def _product_cost(
    dtype: torch.dtype,
    parts: int,
    shapes: Callable[[int, int, int, int], tuple[tuple[int, ...], ...]],
    rank_factor: int = 1,
) -> ProductCost:
    """Fit the constants of a product to its time for few weights, for many, and for more rows."""
    rank = _RANK * rank_factor
    few, many = (parts * rank * width for width in _WIDTHS)

    def time_of(rows: int, width: int) -> float:
        x, matrix = (torch.randn(one).to(dtype) for one in shapes(parts, rows, rank, width))
        if parts > 1:
            out = torch.empty(parts, rows, matrix.shape[1], dtype=dtype)
            return _microseconds(lambda: torch.bmm(x, matrix.mT, out=out))
        out = torch.empty(rows, matrix.shape[1], dtype=dtype)
        return _microseconds(lambda: torch.mm(x[0], matrix[0].T, out=out))

    (fewest, most), (short, long) = _ROWS, _WIDTHS
    first, second, third = time_of(fewest, short), time_of(fewest, long), time_of(most, long)
    weight_and_rows = max((second - first) / (many - few), 0.0)
    row = max((third - second) / ((most - fewest) * many), 0.0)
    call = max(first - weight_and_rows * few, _CALL_MIN)
    return ProductCost(call, max(weight_and_rows - fewest * row, 0.0), row)


def _conversion(size: int) -> Callable[[], object]:
    source = torch.randn(size).to(torch.bfloat16)
    target = torch.empty(size)
    return lambda: target.copy_(source)


def _line(work: Callable[[int], Callable[[], object]], sizes: Sequence[int]) -> tuple[float, float]:
    """Return the constant and the linear part of a work's time."""
    small, large = (_microseconds(work(size)) for size in sizes)
    return small, max((large - small) / sizes[1], 0.0)


def _model_product(dtype: torch.dtype, product: Callable[[Tensor, Tensor, None], Tensor]) -> float:
    """Time the products of a model's layer, for a decode step and for a prompt's chunk."""
    weight = torch.randn(_MODEL_WIDTH, _MODEL_WIDTH).to(dtype)
    inputs = [torch.randn(rows, _MODEL_WIDTH).to(dtype) for rows in _MODEL_ROWS]

    def work() -> list[Tensor]:
        return [product(x, weight, None) for x in inputs]

    return _microseconds(work)


def _microseconds(work: Callable[[], object]) -> float:
    """Return the shortest of some samples of the thread's time, which excludes other processes."""
    started = time.thread_time()
    work()
    first = max(time.thread_time() - started, 1e-7)
    repeats = max(1, min(200, int(_SAMPLE_S / _SAMPLES / first)))
    best = first
    for _ in range(_SAMPLES):
        started = time.thread_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.thread_time() - started) / repeats)
    return best * 1e6


def _machine_key() -> str:
    """Return a hash of what the constants depend on: processor, instructions and library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = [partial(_is_field, name) for name in ("model name", "cpu family", "model", "flags")]
    processor = [next(filter(kind_is, lines), "") for kind_is in kinds]
    parts = [_FORMAT, platform.machine(), torch.__version__, *processor]
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:16]


def _is_field(name: str, line: str) -> bool:
    return line.partition(":")[0].strip() == name


def _cache_directory() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return Path(configured or os.path.expanduser("~/.cache")) / "loradock"


def _numbers(value: object) -> list[float]:
    """Return the numbers of a calibration in the order of its fields."""
    if isinstance(value, tuple):
        return [number for part in value for number in _numbers(part)]
    return [float(value)]  # type: ignore[arg-type]


def _decoded(numbers: Any) -> Calibration:
    """Return the calibration of `_numbers`; raises ValueError or TypeError for anything else."""
    template = Calibration(DEFAULT_COSTS, ProductSpeeds(1.0, 1.0, 1.0, 1.0))
    given = [float(number) for number in numbers]
    if len(given) != len(_numbers(template)) or not all(0.0 <= one < 1e9 for one in given):
        raise ValueError("the file is not a calibration")
    found = _filled(template, iter(given))
    if not isinstance(found, Calibration):
        raise TypeError("the file is not a calibration")
    return found


def _filled(template: object, numbers: Any) -> object:
    """Return a tuple of the same structure with the next numbers."""
    if not isinstance(template, tuple):
        return next(numbers)
    parts = [_filled(part, numbers) for part in template]
    kind: Any = type(template)
    return tuple(parts) if kind is tuple else kind(*parts)
