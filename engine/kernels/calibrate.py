"""`python -m loradock.engine.kernels.calibrate`: measure this machine, store and print constants.

It prints one JSON document: what was measured, where it is stored, and what `--dtype auto` chooses.
"""

import json
import time
from typing import Any, Final

import torch

from loradock.engine.kernels.cpu import base_linear
from loradock.engine.kernels.cpu.base_linear import WAYS, WayTimes, fastest_ways
from loradock.engine.kernels.cpu.calibration import (
    Calibration,
    faster_dtype,
    measure,
    store,
    stored_at,
)
from loradock.engine.kernels.cpu.costs import ROWS

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    """Measure, store and print; a file that can't be written is reported in `error`."""
    started = time.process_time()
    measured = measure()
    seconds, path, error = time.process_time() - started, stored_at(), ""
    try:
        store(measured, path)
    except OSError as failure:
        error = f"{failure.strerror}: {path}"
    print(
        json.dumps(
            {
                "file": str(path),
                "error": error,
                "torch": torch.__version__,
                "seconds": round(seconds, 3),
                **report(measured),
            }
        )
    )


def report(measured: Calibration) -> dict[str, Any]:
    """Return the constants, and what follows from them.

    `products_us`: microseconds of a model's own products of 16 and 61 rows. `float32_products`:
    by numbers of rows, the way that is used and the microseconds of each way. `auto_dtype`: what
    `--dtype auto` loads a model in, by the dtype in which it was saved. `rows`: the numbers of rows
    that `columns` and `weights` of the costs are for.
    """
    products = measured.products
    return {
        "products_us": {_name(one): products.of(one) for one in _DTYPES},
        "float32_products": _ways(products.float32),
        "auto_dtype": {_name(one): _name(faster_dtype(one, products)) for one in _DTYPES},
        "rows": ROWS,
        "costs": _fields(measured.costs),
    }


def _ways(times: WayTimes) -> list[dict[str, Any]]:
    by_rows = zip(base_linear.ROWS, fastest_ways(times), times, strict=True)
    return [
        {"rows": rows, "way": way, "us": dict(zip(WAYS, map(_rounded, by_way), strict=True))}
        for rows, way, by_way in by_rows
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fields(value: Any) -> Any:
    """Return nested named tuples as dictionaries, numbers with the digits that were measured."""
    if hasattr(value, "_asdict"):
        return {name: _fields(part) for name, part in value._asdict().items()}
    if isinstance(value, tuple):
        return [_fields(part) for part in value]
    return _rounded(value)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


if __name__ == "__main__":
    main()
