"""`python -m benchmarks.gpu_kernels`: the cost of the linear operation, cell by cell.

Appends microseconds, the share of the measured copy bandwidth, and the ratio to the base layer's
GEMM to the figures of `make gpu`, and writes them with the targets to `gpu-<device>.md`. A cell is
timed only after its result was compared with the reference. Only PyTorch and Triton are required.
"""

import sys
from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

import torch

from benchmarks.device_layers import (
    DTYPE,
    FLUSH_BYTES,
    Cell,
    check_close,
    copy_bytes_per_second,
    groups_of,
    layer_of,
    microseconds,
)
from benchmarks.gpu_lines import append, figures_path
from loradock.engine.kernels import choose_kernels

TOKENS: Final = (1, 8, 32, 64, 256, 2048)
ADAPTERS: Final = (1, 8, 64)
RANKS: Final = {"8": (8,), "16": (16,), "64": (64,), "8-128": (8, 128, 16, 64, 32)}
HIDDEN: Final = (4096, 8192)
RANK_8_AMONG_8: Final = Cell(64, 64, (8,), 4096, idle=(8,) * 8)
RANK_8_AMONG_256: Final = Cell(64, 64, (8,), 4096, idle=(256,) * 8)
"""The same batch, where other slots have rank 256, and so scratch memory is sized for it."""

MICROSECONDS_MAX: Final = 10.0
"""For 64 distinct adapters of rank 16 at hidden 4096, on an H200."""
BANDWIDTH_SHARE_MIN: Final = 0.5
LARGE_BYTES: Final = 32 << 20
"""The target for the share of the copy bandwidth applies to cells with more bytes of weights."""
PADDING_RATIO_MAX: Final = 1.1


class CellFigures(NamedTuple):
    """One cell; `share` is of the copy bandwidth, `vs_gemm` the ratio to the base layer."""

    hidden: int
    ranks: str
    adapters: int
    tokens: int
    weight_bytes: int
    bytes_moved: int
    microseconds: float
    share: float
    vs_gemm: float

    @property
    def has_time_target(self) -> bool:
        """Whether the target in microseconds applies to this cell."""
        return (self.hidden, self.ranks, self.adapters, self.tokens) == (4096, "16", 64, 64)


def main() -> int:
    """Measure every cell and write the document."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return 0
    bandwidth = copy_bytes_per_second()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    measured = []
    for name, cell in cells():
        measured.append(measure(name, cell, flush, bandwidth))
        append("kernels", **measured[-1]._asdict())
    both = (RANK_8_AMONG_8, RANK_8_AMONG_256)
    padding_us = [measure("8", cell, flush, bandwidth).microseconds for cell in both]
    write(measured, bandwidth, padding_us)
    print("\n".join(target_lines(measured, bandwidth, padding_us)))
    return 0


def cells() -> Iterator[tuple[str, Cell]]:
    """Yield every cell in which each adapter has a row, with the name of its ranks."""
    for hidden, name, adapters, tokens in product(HIDDEN, RANKS, ADAPTERS, TOKENS):
        if adapters <= tokens:
            yield name, Cell(tokens, adapters, RANKS[name], hidden)


def measure(name: str, cell: Cell, flush: torch.Tensor, bandwidth: float) -> CellFigures:
    """Measure one cell, after its result was compared."""
    device = flush.device
    layer, groups = layer_of(cell, device), groups_of(cell, device)
    kernels = choose_kernels("cuda", "triton")
    x = torch.randn(cell.tokens, cell.hidden, device=device, dtype=DTYPE)
    y = torch.zeros_like(x)
    check(cell, kernels.linear, (x, layer, groups))
    time = microseconds(lambda: kernels.linear(y, x, layer, groups), flush)
    weight = torch.randn(cell.hidden, cell.hidden, device=device, dtype=DTYPE)
    gemm = microseconds(lambda: torch.mm(x, weight.T, out=y), flush)
    share = cell.bytes_moved / (time * 1e-6) / bandwidth
    return CellFigures(
        cell.hidden, name, cell.adapters, cell.tokens, cell.weight_bytes, cell.bytes_moved,
        round(time, 2), share, time / gemm,
    )  # fmt: skip


def check(cell: Cell, linear, operands) -> None:
    """Raise AssertionError unless the operation's result is that of the reference in float32."""
    x, layer, groups = operands
    found, expected = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.float32)
    linear(found, x, layer, groups)
    choose_kernels("cuda", "reference").linear(expected, x.float(), layer, groups)
    check_close(cell, found, expected)


def write(measured: list[CellFigures], bandwidth: float, padding_us: list[float]) -> None:
    """Write the document, named after the device."""
    text = document(torch.cuda.get_device_name(), measured, bandwidth, padding_us)
    figures_path().with_suffix(".md").write_text(text)


def document(
    device: str, measured: list[CellFigures], bandwidth: float, padding_us: list[float]
) -> str:
    """Return the targets and the table as Markdown."""
    lines = [
        f"# The linear operation on {device}",
        "",
        f"Graphs replayed with cold caches. A copy moves {bandwidth / 1e12:.2f} TB/s; a cell's "
        "share of that counts its weights and inputs once and its outputs twice.",
        "",
        *(f"- {line}" for line in target_lines(measured, bandwidth, padding_us)),
        "",
        "| hidden | ranks | adapters | tokens | weights, MB | us | share of copy | ratio to GEMM |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [
        f"| {m.hidden} | {m.ranks} | {m.adapters} | {m.tokens} | {m.weight_bytes / 1e6:.1f} "
        f"| {m.microseconds:.1f} | {m.share:.0%} | {m.vs_gemm:.2f} |"
        for m in measured
    ]
    return "\n".join([*lines, *rows]) + "\n"


def target_lines(
    measured: list[CellFigures], bandwidth: float, padding_us: list[float]
) -> list[str]:
    """Return a line per target: the measurement, the target, and whether it was reached."""
    lines = []
    for one in filter(lambda one: one.has_time_target, measured):
        bare = 1e6 * one.bytes_moved / bandwidth
        lines.append(
            f"64 adapters of rank 16, one row each, hidden 4096: {one.microseconds:.1f} us; the "
            f"bytes alone take {bare:.1f}. Target on an H200: <= {MICROSECONDS_MAX:.0f} us, "
            f"{_reached(one.microseconds <= MICROSECONDS_MAX)}."
        )
    large = [one for one in measured if one.weight_bytes > LARGE_BYTES]
    if large:
        worst = min(large, key=lambda one: one.share)
        lines.append(
            f"{len(large)} cells with weights of more than {LARGE_BYTES >> 20} MiB: the smallest "
            f"share of the copy bandwidth is {worst.share:.0%} (hidden {worst.hidden}, ranks "
            f"{worst.ranks}, {worst.adapters} adapters, {worst.tokens} tokens). "
            f"Target: >= {BANDWIDTH_SHARE_MIN:.0%}, {_reached(worst.share >= BANDWIDTH_SHARE_MIN)}."
        )
    ratio = padding_us[1] / padding_us[0]
    lines.append(
        f"Rank 8, 64 adapters, one row each, hidden 4096: {padding_us[0]:.1f} us among slots of 8, "
        f"{padding_us[1]:.1f} us among slots of 256. "
        f"Target: at most {PADDING_RATIO_MAX} times as long, "
        f"{_reached(ratio <= PADDING_RATIO_MAX)}."
    )
    return lines


def _reached(is_reached: bool) -> str:
    return "reached" if is_reached else "not reached"


if __name__ == "__main__":
    sys.exit(main())
