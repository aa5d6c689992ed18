"""The LoRA arithmetic on a CPU: beside the layer's own product, and beside other ways to do it.

What it is: the figures named `kernels.*`, the worst cell of each, and the whole table on the
screen. What it is not: a model's forward; that is `layers`. One rule: all that one cell compares is
measured in turns, in this process's own time, on one thread.

A cell is one linear layer and one batch: from 128 tokens on a prefill, where an adapter's rows lie
side by side; below that a decode, whose rows change adapter from each to the next.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.figures import Figure
from engine.directory import SlotDirectory
from engine.kernels import choose_kernels
from engine.kernels.cpu.blocks import short_blocks
from engine.kernels.cpu.costs import Choice
from engine.kernels.cpu.dense import Dense
from engine.kernels.cpu.gathered import Gathered
from engine.kernels.cpu.grouped import Grouped
from engine.kernels.cpu.layer import computation_dtypes, layer_block
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.operands import Directory, Groups, LoRASlices
from engine.layout import aligned_elements
from engine.punica import LoRAMapping, PunicaWrapper

HIDDEN: Final = (1024, 4096)
RANKS: Final = (16, 64)
TOKENS: Final = (1, 16, 128, 512)
ADAPTERS: Final = (1, 8, 32)
DTYPES: Final = (torch.float32, torch.bfloat16)
PREFILL_TOKENS: Final = 128
ROUNDS: Final = 11
SAMPLE_SECONDS: Final = 2e-3
"""How long one sample lasts at least, so that the clock's steps don't show."""

DELTA_MAX, BEST_MAX, GATHER_MAX = 0.35, 1.3, 0.1

Work = Callable[[], object]


class Cell(NamedTuple):
    """One layer and one batch."""

    dtype: torch.dtype
    hidden: int
    rank: int
    tokens: int
    adapters: int

    @property
    def text(self) -> str:
        """What a figure says of where it was found."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.tokens} tokens, {self.adapters} adapters of rank {self.rank}, "
            f"hidden {self.hidden}, {dtype}"
        )


class Times(NamedTuple):
    """Microseconds of one cell; `ways` by name; None where not measured."""

    gemm: float
    chosen: float
    ways: dict[str, float]
    copies: float | None
    invariant: float | None


def run() -> Iterator[Figure]:
    """Every figure of the group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            measured = {cell: _measure(cell) for cell in _cells()}
    finally:
        torch.set_num_threads(threads)
    Console(width=150).print(_table(measured))
    yield _delta_vs_gemm(measured)
    yield _best_of(measured)
    yield _vs_gather(measured)
    yield _batch_invariant(measured)


def _cells() -> list[Cell]:
    cells = map(Cell._make, product(DTYPES, HIDDEN, RANKS, TOKENS, ADAPTERS))
    return [cell for cell in cells if cell.adapters <= cell.tokens]


def _measure(cell: Cell) -> Times:
    torch.manual_seed(0)
    a, b, slices = _lay_out(cell)
    x = torch.randn(cell.tokens, cell.hidden).to(cell.dtype)
    y = torch.randn(cell.tokens, cell.hidden).to(cell.dtype)
    base = torch.randn(cell.hidden, cell.hidden).to(cell.dtype)
    slots = _slots(cell)
    groups = _groups(slots, cell.adapters)
    works: dict[str, Work] = {
        "gemm": lambda: torch.nn.functional.linear(x, base),
        "chosen": _call("cpu", False, y, x, slices, groups),
    }
    ways = _ways(y, x, slices, groups)
    works |= ways
    if cell.tokens >= PREFILL_TOKENS:
        works["copies"] = lambda: _copy_per_token(y, x, a, b, slots)
    if cell.rank == 16 and cell.adapters == 8:
        works["invariant"] = _call("cpu", True, y, x, slices, groups)
    best = dict(zip(works, _in_turns(list(works.values())), strict=True))
    return Times(
        best["gemm"],
        best["chosen"],
        {name: best[name] for name in ways},
        best.get("copies"),
        best.get("invariant"),
    )


def _slots(cell: Cell) -> Tensor:
    """Each row's slot."""
    rows = torch.arange(cell.tokens)
    if cell.tokens < PREFILL_TOKENS:
        return rows % cell.adapters
    return rows * cell.adapters // cell.tokens


def _groups(slots: Tensor, adapters: int) -> Groups:
    punica = PunicaWrapper(torch.device("cpu"), max(RANKS), choose_kernels("cpu"))
    punica.update_metadata(LoRAMapping(slots + 1, []), range(1, adapters + 1))
    assert punica.groups is not None
    return punica.groups


def _call(
    name: str, batch_invariant: bool, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups
) -> Work:
    linear = choose_kernels("cpu", name, batch_invariant).linear
    return lambda: linear(y, x, slices, groups, 1.0)


def _ways(y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> dict[str, Work]:
    """Every strategy in every dtype that it could be chosen in, for the whole batch."""
    dtypes = computation_dtypes(x.dtype, slices.directory.data.dtype)
    choices: list[Choice] = [(Grouped, dtype) for dtype in dtypes]
    choices += [(Dense, dtypes[0]), (Gathered, dtypes[0])]
    names = ["grouped", *(["grouped float32"] if len(dtypes) > 1 else []), "dense", "gathered"]
    return {
        name: _way(choice, y, x, slices, groups)
        for name, choice in zip(names, choices, strict=True)
    }


def _way(choice: Choice, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> Work:
    strategy, dtype = choice
    layers = [layer_block(slices, block, x.dtype) for block in short_blocks(groups, groups.spans)]
    plans = [strategy(layer, dtype, Scratch()) for layer in layers if layer is not None]

    def work() -> None:
        for plan in plans:
            plan.run(y, x, 1.0)

    return work


def _copy_per_token(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> None:
    """The yardstick: each token's own copy of its adapter's A and B."""
    shrunk = torch.bmm(a[slots], x[:, :, None])
    y += torch.bmm(b[slots], shrunk)[:, :, 0]


def _lay_out(cell: Cell) -> tuple[Tensor, Tensor, LoRASlices]:
    """The same weights stacked, and in an arena."""
    shape = (cell.adapters, cell.rank, cell.hidden)
    a = torch.randn(shape).to(cell.dtype)
    b = torch.randn(cell.adapters, cell.hidden, cell.rank).to(cell.dtype)
    size = aligned_elements(cell.rank * cell.hidden, cell.dtype)
    data = torch.empty(2 * size * cell.adapters, dtype=cell.dtype)
    data.view(cell.adapters, 2, size)[:, 0] = a.flatten(1)
    data.view(cell.adapters, 2, size)[:, 1] = b.flatten(1)
    table = SlotDirectory(cell.adapters, 1, torch.device("cpu"))
    for slot in range(cell.adapters):
        offset = torch.tensor([2 * size * slot])
        rank = torch.tensor([cell.rank], dtype=torch.int32)
        table.write(slot, torch.tensor([0]), offset, rank)
    directory = Directory(
        *(data, table.offsets, table.ranks),
        *(table.host_offsets, table.host_ranks, table.edition),
    )
    return a, b, LoRASlices(directory, (0,), cell.hidden, (cell.hidden,))


def _in_turns(works: Sequence[Work]) -> list[float]:
    """Each work's best of `ROUNDS` samples, in microseconds; a slow one has fewer.

    A work runs once before each sample, so that it does not pay for what its neighbour left in the
    caches.
    """
    repeats = [max(1, int(SAMPLE_SECONDS / max(_sample(work, 1), 1e-6))) for work in works]
    best = [float("inf")] * len(works)
    for turn in range(ROUNDS):
        for place, work in enumerate(works):
            if turn < 2 or best[place] < 10 * SAMPLE_SECONDS:
                best[place] = min(best[place], _sample(work, repeats[place]))
    return [seconds * 1e6 for seconds in best]


def _sample(work: Work, repeats: int) -> float:
    work()
    started = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - started) / repeats


def _delta_vs_gemm(measured: dict[Cell, Times]) -> Figure:
    cells = [c for c in measured if (c.hidden, c.rank, c.adapters) == (4096, 16, 8)]
    worst = max(cells, key=lambda cell: measured[cell].chosen / measured[cell].gemm)
    times = measured[worst]
    return _figure("kernels.delta_vs_gemm", worst, times.chosen, times.gemm, DELTA_MAX, "own GEMM")


def _best_of(measured: dict[Cell, Times]) -> Figure:
    worst = max(measured, key=lambda c: measured[c].chosen / min(measured[c].ways.values()))
    times = measured[worst]
    name = min(times.ways, key=lambda way: times.ways[way])
    best = times.ways[name]
    return _figure("kernels.best_of", worst, times.chosen, best, BEST_MAX, f"the best, {name}")


def _vs_gather(measured: dict[Cell, Times]) -> Figure:
    copies = {cell: times.copies for cell, times in measured.items() if times.copies is not None}
    worst = max(copies, key=lambda cell: measured[cell].chosen / copies[cell])
    chosen, noun = measured[worst].chosen, "a weight copy per token"
    return _figure("kernels.vs_gather", worst, chosen, copies[worst], GATHER_MAX, noun)


def _batch_invariant(measured: dict[Cell, Times]) -> Figure:
    some = {cell: t.invariant for cell, t in measured.items() if t.invariant is not None}
    worst = max(some, key=lambda cell: some[cell] / measured[cell].chosen)
    chosen = measured[worst].chosen
    yardstick = f"without batch_invariant: {chosen:,.0f} us ({worst.text})"
    ratio = some[worst] / chosen
    name = "kernels.batch_invariant"
    return Figure(name, some[worst], "us", yardstick, ratio, "what it costs, no aim", True)


def _figure(
    name: str, cell: Cell, value: float, yardstick: float, ratio_max: float, noun: str
) -> Figure:
    ratio = value / yardstick
    text = f"{noun}: {yardstick:,.0f} us ({cell.text})"
    return Figure(name, value, "us", text, ratio, f"ratio <= {ratio_max}", ratio <= ratio_max)


def _table(measured: dict[Cell, Times]) -> Table:
    table = Table(title="one linear layer's delta, microseconds")
    for name in ("dtype", "hidden", "rank", "tokens", "adapters", "own GEMM", "chosen"):
        table.add_column(name, justify="right")
    for name in ("grouped", "float32", "dense", "gathered", "copies", "invariant"):
        table.add_column(name, justify="right")
    table.add_column("of best", justify="right")
    for cell, times in measured.items():
        names = ("grouped", "grouped float32", "dense", "gathered")
        ways = [times.ways.get(name) for name in names]
        numbers = [times.gemm, times.chosen, *ways, times.copies, times.invariant]
        table.add_row(
            *(str(part).removeprefix("torch.") for part in cell),
            *("" if number is None else f"{number:,.0f}" for number in numbers),
            f"{times.chosen / min(times.ways.values()):.2f}",
        )
    return table
