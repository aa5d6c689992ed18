"""`python -m benchmarks.gpu_kernels`: the linear operation's cost on this device, cell by cell.

What it is: microseconds, share of the measured copy bandwidth, and ratio to the layer's own GEMM,
written to `gpu-<device>.md` and `.json` beside this file. What it is not: a test, although a cell
is only timed after its result was compared. One rule: no figure is printed of a wrong result.
"""

import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import Struct

from benchmarks.device_layers import (
    DTYPE,
    FLUSH_BYTES,
    Cell,
    copy_bytes_per_second,
    groups_of,
    layer_of,
    microseconds,
)
from engine.kernels import choose_kernels

TOKENS: Final = (1, 8, 32, 64, 256, 2048)
ADAPTERS: Final = (1, 8, 64)
RANKS: Final = {"8": (8,), "16": (16,), "64": (64,), "8-128": (8, 128, 16, 64, 32)}
HIDDEN: Final = (4096, 8192)
ERROR_MAX: Final = 1e-2


class Measured(Struct, frozen=True):
    """One cell; `share` is of the copy bandwidth, `vs_gemm` of the layer's own product."""

    hidden: int
    ranks: str
    adapters: int
    tokens: int
    microseconds: float
    share: float
    vs_gemm: float


def main() -> int:
    """Measure every cell and write both files."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: nothing is measured")
        return 0
    bandwidth = copy_bytes_per_second()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    measured = []
    for name, cell in cells():
        measured.append(measure(name, cell, max(cell.ranks), flush, bandwidth))
        print(msgspec.json.encode(measured[-1]).decode(), flush=True)
    rank_8 = Cell(64, 64, (8,), 4096)
    among = [measure("8", rank_8, top, flush, bandwidth).microseconds for top in (8, 256)]
    write(measured, bandwidth, among)
    return 0


def cells() -> Iterator[tuple[str, Cell]]:
    """Every cell in which each adapter has a row, with its ranks' name."""
    for hidden, name, adapters, tokens in product(HIDDEN, RANKS, ADAPTERS, TOKENS):
        if adapters <= tokens:
            yield name, Cell(tokens, adapters, RANKS[name], hidden)


def measure(
    name: str, cell: Cell, rank_max: int, flush: torch.Tensor, bandwidth: float
) -> Measured:
    """One cell; `rank_max` is the highest rank that its slots could hold."""
    device = flush.device
    layer, groups = layer_of(cell, device), groups_of(cell, device, rank_max)
    kernels = choose_kernels("cuda", "triton")
    x = torch.randn(cell.tokens, cell.hidden, device=device, dtype=DTYPE)
    y = torch.zeros_like(x)
    check(cell, kernels.linear, (x, layer, groups))
    time = microseconds(lambda: kernels.linear(y, x, layer, groups, 1.0), flush)
    weight = torch.randn(cell.hidden, cell.hidden, device=device, dtype=DTYPE)
    gemm = microseconds(lambda: torch.mm(x, weight.T, out=y), flush)
    share = cell.bytes_moved / (time * 1e-6) / bandwidth
    return Measured(
        cell.hidden, name, cell.adapters, cell.tokens, round(time, 2), share, time / gemm
    )


def check(cell: Cell, linear, operands) -> None:
    """Raise AssertionError unless the operation gives what the reference gives in float32."""
    x, layer, groups = operands
    found, expected = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.float32)
    linear(found, x, layer, groups, 1.0)
    choose_kernels("cuda", "reference").linear(expected, x.float(), layer, groups, 1.0)
    error = float((found - expected).norm() / expected.norm())
    if not error <= ERROR_MAX:
        raise AssertionError(f"{cell}: an error of {error}")


def write(measured: list[Measured], bandwidth: float, among: list[float]) -> None:
    """Both files, named after the device."""
    device = torch.cuda.get_device_name()
    place = Path(__file__).parent / f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower())}"
    encoded = msgspec.json.encode(measured)
    place.with_suffix(".json").write_bytes(msgspec.json.format(encoded) + b"\n")
    place.with_suffix(".md").write_text(document(device, measured, bandwidth, among))


def document(device: str, measured: list[Measured], bandwidth: float, among: list[float]) -> str:
    """The table as Markdown."""
    lines = [
        f"# The linear operation on {device}",
        "",
        f"A copy moves {bandwidth / 1e12:.2f} TB/s. Rank 8, 64 adapters, one row each, hidden "
        f"4096: {among[0]:.1f} us among slots of 8, {among[1]:.1f} us among slots of 256.",
        "",
        "| hidden | ranks | adapters | tokens | us | share of copy | ratio to GEMM |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [
        f"| {m.hidden} | {m.ranks} | {m.adapters} | {m.tokens} | {m.microseconds:.1f} "
        f"| {m.share:.0%} | {m.vs_gemm:.2f} |"
        for m in measured
    ]
    return "\n".join([*lines, *rows]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
