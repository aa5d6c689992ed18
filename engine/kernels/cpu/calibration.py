"""Constants of this machine: a `CostTable`, and the speed of products in each dtype.

They are measured once, in less than a second on one thread, and stored in the user's cache
directory by the processor's name and the library's version. A file that can't be read is measured
again, and one that can't be written is not stored.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.kernels.cpu.base_linear import has_onednn, onednn_linear
from engine.kernels.cpu.costs import DEFAULT_COSTS, CostTable
from engine.kernels.cpu.product_timing import dtype_costs, microseconds
from engine.kernels.threads import threads_for

CALIBRATED_BYTES_MIN: Final = 64 << 20
"""The least weights of a model for which a machine is measured."""

FASTER_MIN: Final = 1.5
"""How many times as fast float32 products must be, because its weights take twice the memory."""

ONEDNN_MIN: Final = 1.2
"""How many times as fast oneDNN must be to be used."""

_FORMAT: Final = 4
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_CONVERTED: Final = (16, 1 << 18)
_CONVERTED_PARTS: Final = 16
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
    path = stored_at(directory)
    try:
        return _decoded(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
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
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(_numbers(measured)))
    temporary.replace(path)


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
            dtype_costs(torch.float32), dtype_costs(torch.bfloat16), convert_call, convert_element
        )
        float32, bfloat16, float16 = (_model_product(dtype, linear) for dtype in _DTYPES)
        # Without the operation it counts as equally fast, and is not used.
        onednn = _model_product(torch.float32, onednn_linear) if has_onednn() else float32
        return Calibration(costs, ProductSpeeds(float32, bfloat16, float16, onednn))


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


def _model_product(dtype: torch.dtype, product: Callable[[Tensor, Tensor, None], Tensor]) -> float:
    """Time the products of a model's layer, for a decode step and for a prompt's chunk."""
    weight = torch.randn(_MODEL_WIDTH, _MODEL_WIDTH).to(dtype)
    inputs = [torch.randn(rows, _MODEL_WIDTH).to(dtype) for rows in _MODEL_ROWS]

    def work() -> list[Tensor]:
        return [product(x, weight, None) for x in inputs]

    return microseconds(work)


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
