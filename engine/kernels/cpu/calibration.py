"""Constants of this machine: a `CostTable`, and the speed of products in each dtype.

They are measured once, in one or two seconds of one thread, and stored in the user's cache
directory by the processor's name and the library's version. A file that can't be read is measured
again, and one that can't be written is not stored.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.random import fork_rng

from loradock.engine.kernels.cpu.base_linear import ROWS, WAYS, WayTimes, fastest_ways
from loradock.engine.kernels.cpu.costs import DEFAULT_COSTS, CostTable
from loradock.engine.kernels.cpu.product_timing import dtype_costs, microseconds
from loradock.engine.kernels.threads import threads_for

CALIBRATED_BYTES_MIN: Final = 64 << 20
"""The least weights of a model for which a machine is measured."""

FASTER_MIN: Final = 1.5
"""How many times as fast float32 products must be, because its weights take twice the memory."""

_FORMAT: Final = 8
_US_MAX: Final = 1e9
_PROCESSOR_FIELDS: Final = (
    *("model name", "cpu family", "model", "flags"),
    *("CPU implementer", "CPU variant", "CPU part", "Features"),
)
"""Fields of /proc/cpuinfo: of x86, and of ARM."""
_CONVERTED: Final = (16, 1 << 18)
_CONVERTED_PARTS: Final = 16
_MODEL_WEIGHT: Final = (2048, 768)
_MODEL_WEIGHTS: Final = 3
_ROUNDS: Final = 5
_MODEL_ROWS: Final = ROWS[2:4]
"""Of a decode step, and of a prompt's chunk."""


class ProductSpeeds(NamedTuple):
    """Microseconds of a model's own products, [2048, 768].

    float32: for each of `ROWS` by each of `WAYS`. The others: of 16 and 61 rows together.
    """

    float32: WayTimes
    bfloat16: float
    float16: float

    def of(self, dtype: torch.dtype) -> float:
        """Return the time of 16 and 61 rows; 0 for a dtype that is not measured."""
        if dtype == torch.float32:
            ways = fastest_ways(self.float32)
            by_rows = dict(zip(ROWS, zip(ways, self.float32, strict=True), strict=True))
            used = [by_rows[rows] for rows in _MODEL_ROWS]
            return sum(dict(zip(WAYS, times, strict=True))[way] for way, times in used)
        return {torch.bfloat16: self.bfloat16, torch.float16: self.float16}.get(dtype, 0.0)


class Calibration(NamedTuple):
    """What is measured of a machine."""

    costs: CostTable
    products: ProductSpeeds


def calibration(directory: Path | None = None) -> Calibration:
    """Return this machine's constants: stored ones, or measured and then stored.

    `directory`: where they are stored; None for the user's cache directory.
    """
    path = stored_at(directory)
    try:
        return decode_calibration(path.read_bytes())
    except (OSError, ValueError):
        measured = measure()
    # Without a stored file the constants are measured at every start.
    with suppress(OSError):
        store(measured, path)
    return measured


def stored_at(directory: Path | None = None) -> Path:
    """Return the file of this machine's constants; `directory` as in `calibration`."""
    return (directory or _cache_directory()) / f"cpu-{_machine_key()}.json"


def store(measured: Calibration, path: Path) -> None:
    """Write a calibration to be used from the next start on; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes of several containers may share the directory and have equal ids.
    draft = path.with_suffix(f".{token_hex(8)}")
    try:
        draft.write_bytes(encode_calibration(measured))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def encode_calibration(measured: Calibration) -> bytes:
    """Return the bytes that are stored, and that ranks send to each other."""
    return json.dumps(_numbers(measured)).encode()


def decode_calibration(data: bytes) -> Calibration:
    """Return the calibration that was encoded; raises ValueError for any other bytes."""
    times = ((1.0,) * len(WAYS),) * len(ROWS)
    template = Calibration(DEFAULT_COSTS, ProductSpeeds(times, 1.0, 1.0))
    try:
        numbers = json.loads(data)
    except RecursionError:
        numbers = None
    is_list = isinstance(numbers, list) and len(numbers) == len(_numbers(template))
    if not (is_list and all(type(one) is float and 0.0 <= one < _US_MAX for one in numbers)):
        raise ValueError("these bytes are no calibration")
    found: Calibration = _filled(template, iter(numbers))
    return found


def faster_dtype(saved: torch.dtype, products: ProductSpeeds) -> torch.dtype:
    """Return float32 where a model's products are much faster in it than in the saved dtype.

    Weights are never rounded: a model that was saved in float32 remains so.
    """
    is_slow = products.of(saved) >= FASTER_MIN * products.of(torch.float32)
    return torch.float32 if is_slow else saved


def measure() -> Calibration:
    """Measure the constants on one thread."""
    # A program's own random numbers must not depend on whether there was a stored file.
    with threads_for(1), torch.inference_mode(), fork_rng(devices=()):
        convert_call, convert_element = _line(_conversion, _CONVERTED)
        costs = CostTable(
            dtype_costs(torch.float32), dtype_costs(torch.bfloat16), convert_call, convert_element
        )
        float32 = tuple([_way_times(rows) for rows in ROWS])
        bfloat16, float16 = (
            sum(_model_product(dtype, rows) for rows in _MODEL_ROWS)
            for dtype in (torch.bfloat16, torch.float16)
        )
        return Calibration(costs, ProductSpeeds(float32, bfloat16, float16))


def _conversion(size: int) -> float:
    """Time the conversion of one of many matrices, which are not in the nearer caches."""
    sources = torch.randn(_CONVERTED_PARTS, size).to(torch.bfloat16)
    target = torch.empty(size)

    def work() -> None:
        for source in sources:
            target.copy_(source)

    return microseconds(work) / _CONVERTED_PARTS


def _line(time_of: Callable[[int], float], sizes: Sequence[int]) -> tuple[float, float]:
    """Return the constant and the linear part of a work's time."""
    small, large = (time_of(size) for size in sizes)
    return small, max((large - small) / sizes[1], 0.0)


def _way_times(rows: int) -> tuple[float, ...]:
    """Time a product of a model's layer in each of `WAYS`, in turn: a machine's speed varies."""
    x, weights = _model_operands(torch.float32, rows)
    best = [float("inf")] * len(WAYS)
    for _ in range(_ROUNDS):
        for way, product in enumerate(WAYS.values()):
            started = time.thread_time()
            product(x, next(weights), None)
            best[way] = min(best[way], time.thread_time() - started)
    return tuple([seconds * 1e6 for seconds in best])


def _model_product(dtype: torch.dtype, rows: int) -> float:
    """Time a product of a model's layer."""
    x, weights = _model_operands(dtype, rows)
    return microseconds(lambda: linear(x, next(weights)))


def _model_operands(dtype: torch.dtype, rows: int) -> tuple[Tensor, Iterator[Tensor]]:
    """Return x and weights; as in a model, the next one is not in the nearer caches."""
    weights = torch.randn(_MODEL_WEIGHTS, *_MODEL_WEIGHT).to(dtype)
    return torch.randn(rows, _MODEL_WEIGHT[1]).to(dtype), cycle(weights)


def _machine_key() -> str:
    """Return a hash of what the constants depend on: processor, instructions and library."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = [next(filter(partial(_is_field, name), lines), "") for name in _PROCESSOR_FIELDS]
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


def _filled(template: Any, numbers: Iterator[float]) -> Any:
    """Return a tuple of the same structure with the next numbers."""
    if not isinstance(template, tuple):
        return next(numbers)
    parts = [_filled(part, numbers) for part in template]
    kind = type(template)
    return tuple(parts) if kind is tuple else kind(*parts)
