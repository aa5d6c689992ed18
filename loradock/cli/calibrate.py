"""The `calibrate` command: this machine's products are measured by the engine, in its process."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import typer

from loradock.cli.context import AsJson, output_of
from loradock.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from loradock.cli.output import Renderable

_MODULE: Final = "loradock.engine.kernels.calibrate"
_TIMEOUT_S: Final = 120.0
"""For the imports and the measurement, which takes a second or two of the processor's time."""

_RANK: Final = 16
_COLUMNS: Final = 1024
"""The product whose times are shown."""

app = typer.Typer()


@app.command()
def calibrate(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Measure this processor now, show what --dtype auto chooses, and store it for later starts.

    A start measures by itself if nothing is stored. Engines that run keep what they have.
    """
    output = output_of(ctx, as_json)
    with output.progress("measuring"):
        measured = _measured()
    if as_json:
        output.document(measured)
    else:
        output.show(*tables(measured))
    if measured["error"]:
        raise CommandError(
            ExitCode.FAILURE,
            f"the constants were not stored: {measured['error']}",
            "XDG_CACHE_HOME names the directory above; the default is ~/.cache",
        )


def _measured() -> dict[str, Any]:
    command = [sys.executable, "-m", _MODULE]
    try:
        ended = subprocess.run(  # noqa: S603 - our own module
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            ExitCode.FAILURE, f"the measurement did not end in {_TIMEOUT_S:g} s"
        ) from error
    if ended.returncode:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise CommandError(
            ExitCode.FAILURE,
            f"the measurement ended with {ended.returncode}: {last}",
            f"`python -m {_MODULE}` shows everything that it prints",
        )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def tables(measured: dict[str, Any]) -> "Iterator[Renderable]":
    """Return tables of the products of models and of adapters, and where they are stored."""
    from loradock.cli.output import FittingTable, field_table

    chosen, times = measured["auto_dtype"], measured["products_us"]
    yield FittingTable(
        ("MODEL SAVED IN", "ITS PRODUCTS TAKE", "--dtype auto"),
        [(saved, f"{times[saved]:,.0f} us", chosen[saved]) for saved in chosen],
    )
    yield FittingTable(
        ("float32 PRODUCTS", "COMPUTED BY", "us", "us BY PyTorch"),
        [_way(**product) for product in measured["float32_products"]],
    )
    rows = measured["rows"]
    yield FittingTable(
        ("ADAPTERS' PRODUCTS, us", *(f"{count} row{'s' * (count > 1)}" for count in rows)),
        _costs(measured["costs"]),
    )
    yield field_table(
        {
            "shape": f"rank {_RANK}, {_COLUMNS:,} columns; those of several parts have 8",
            "measured in": f"{measured['seconds']:.2f} s, torch {measured['torch']}",
            "stored in": measured["file"],
        }
    )


def _way(rows: int, way: str, us: dict[str, float]) -> tuple[str, ...]:
    """Return how a model's own products of up to `rows` rows are computed."""
    return f"up to {rows} row{'s' * (rows > 1)}", way, f"{us[way]:,.0f}", f"{us['PyTorch']:,.0f}"


def _costs(costs: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the microseconds of each product by rows."""
    for dtype in ("float32", "bfloat16"):
        for kind, name in (("looped", "one part"), ("batched", "several parts")):
            for product, side in zip(costs[dtype][kind], ("A", "B"), strict=True):
                times = (
                    product["call"] + _COLUMNS * (columns + _RANK * weights)
                    for columns, weights in zip(product["columns"], product["weights"], strict=True)
                )
                yield (f"{dtype}, {name}, {side}", *(f"{time:,.0f}" for time in times))
