"""The LoRA arithmetic on a CPU: beside the layer's own product, and beside other ways to do it.

What it is: the figures named `kernels.*`, the worst cell of each, and the whole table on the
screen. What it is not: a model's forward; that is `layers`. One rule: a cell over an aim is
measured once more, longer and in fresh memory, and then that measurement counts, whatever it says.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure
from benchmarks.kernel_cells import WAYS, Bench, Cell, cells
from benchmarks.rounds import Rounds, in_turns

DELTA_MAX, BEST_MAX, GATHER_MAX = 0.35, 1.3, 0.1
SECONDS: Final = 0.6
"""About how long a cell's works take turns."""
SECONDS_AGAIN: Final = 3.0
"""The same for a cell that is over an aim."""
NOTE: Final = """\
One thread. Microseconds are medians of process time, a ratio is the median over the rounds. 'best
of': the chosen way over each other way, the worst of these; 'wall': that one by the clock on the
wall. 'copies': over a weight copy per token; 'kept': the same where the copies' memory is kept from
call to call; 'bare': the fewest calls of PyTorch that make the delta, over 'copies'. A star: over
an aim at first, so measured again for {times} times as long and in new memory, and that counts."""


class Compared(NamedTuple):
    """What was measured in one cell; `copies` is None below `kernel_cells.PREFILL_TOKENS`."""

    cell: Cell
    ways: Rounds
    gemm: Rounds
    copies: Rounds | None
    is_second: bool

    @property
    def best(self) -> str:
        """The way beside which the chosen one is the slowest."""
        return max(self._ways, key=lambda way: self.ways.ratio("chosen", way))

    @property
    def of_best(self) -> float:
        """How many times as long as that way the chosen one takes."""
        return self.ways.ratio("chosen", self.best)

    @property
    def of_best_by_wall(self) -> float:
        """The same by the clock on the wall."""
        return self.ways.wall_ratio("chosen", self.best)

    @property
    def of_gemm(self) -> float:
        """The chosen way over the layer's own product."""
        return self.gemm.ratio("chosen", "gemm")

    @property
    def of_copies(self) -> float | None:
        """The chosen way over a weight copy per token."""
        return self.copies.ratio("chosen", "copies") if self.copies else None

    @property
    def of_kept(self) -> float | None:
        """The same where the copies' memory is kept."""
        return self.copies.ratio("chosen", "kept") if self.copies else None

    @property
    def bare_of_copies(self) -> float | None:
        """The fastest of the bare calls over a weight copy per token."""
        if self.copies is None:
            return None
        bare = [name for name in self.copies.names if name.startswith("bare")]
        return min(self.copies.ratio(name, "copies") for name in bare)

    @property
    def is_over(self) -> bool:
        """Whether any aim is missed here."""
        is_slow = self.cell.is_for_delta and self.of_gemm > DELTA_MAX
        return is_slow or self.of_best > BEST_MAX or (self.of_copies or 0.0) > GATHER_MAX

    @property
    def _ways(self) -> list[str]:
        return [name for name in self.ways.names if name in WAYS]


def run() -> Iterator[Figure]:
    """Every figure of the group."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            found = [measured(cell, _compare) for cell in cells()]
    finally:
        torch.set_num_threads(threads)
    console = Console(width=190)
    console.print(_table(found))
    console.print(NOTE.format(times=round(SECONDS_AGAIN / SECONDS)))
    yield _delta_vs_gemm(found)
    yield _best_of(found)
    yield _vs_gather(found)
    yield _batch_invariant(found)


def measured(cell: Cell, compare: Callable[..., Compared]) -> Compared:
    """What counts of a cell: the first comparison, or where that misses an aim the second."""
    found = compare(cell, SECONDS, is_second=False)
    return compare(cell, SECONDS_AGAIN, is_second=True) if found.is_over else found


def _compare(cell: Cell, seconds: float, *, is_second: bool) -> Compared:
    bench = Bench(cell)
    chosen = bench.chosen()
    works = {"chosen": chosen, **bench.ways()}
    if cell.is_for_invariant:
        works["invariant"] = bench.chosen(batch_invariant=True)
    ways = in_turns(works, seconds)
    # Apart, because the layer's own weights push all others out of the caches.
    gemm = in_turns({"chosen": chosen, "gemm": bench.gemm}, seconds / 4)
    copies = None
    if cell.is_prefill:
        beside = {"copies": bench.copies, "kept": bench.copies_kept(), "chosen": chosen}
        copies = in_turns({**beside, **bench.bare()}, seconds)
    return Compared(cell, ways, gemm, copies, is_second)


def _delta_vs_gemm(found: list[Compared]) -> Figure:
    worst = max((c for c in found if c.cell.is_for_delta), key=lambda c: c.of_gemm)
    text = f"own GEMM: {worst.gemm.microseconds('gemm'):,.0f} us ({worst.cell.text})"
    return _figure("kernels.delta_vs_gemm", worst.gemm, text, worst.of_gemm, DELTA_MAX)


def _best_of(found: list[Compared]) -> Figure:
    worst = max(found, key=lambda c: c.of_best)
    best = worst.best
    text = (
        f"the best, {best}: {worst.ways.microseconds(best):,.0f} us ({worst.cell.text}); "
        f"by the clock on the wall {worst.of_best_by_wall:.2f}"
    )
    return _figure("kernels.best_of", worst.ways, text, worst.of_best, BEST_MAX)


def _vs_gather(found: list[Compared]) -> Figure:
    worst = max(found, key=lambda c: c.of_copies or 0.0)
    assert worst.copies is not None
    text = (
        f"a weight copy per token: {worst.copies.microseconds('copies'):,.0f} us "
        f"({worst.cell.text}); PyTorch's bare calls alone: {worst.bare_of_copies:.3f}; "
        f"beside copies in kept memory: {worst.of_kept:.3f}"
    )
    return _figure("kernels.vs_gather", worst.copies, text, worst.of_copies or 0.0, GATHER_MAX)


def _batch_invariant(found: list[Compared]) -> Figure:
    some = [c for c in found if c.cell.is_for_invariant]
    worst = max(some, key=lambda c: c.ways.ratio("invariant", "chosen"))
    times = worst.ways
    text = f"without batch_invariant: {times.microseconds('chosen'):,.0f} us ({worst.cell.text})"
    ratio, aim = times.ratio("invariant", "chosen"), "what it costs, no aim"
    value = times.microseconds("invariant")
    return Figure("kernels.batch_invariant", value, "us", text, ratio, aim, True)


def _figure(name: str, rounds: Rounds, text: str, ratio: float, ratio_max: float) -> Figure:
    value = rounds.microseconds("chosen")
    return Figure(name, value, "us", text, ratio, f"ratio <= {ratio_max}", ratio <= ratio_max)


def _table(found: list[Compared]) -> Table:
    table = Table(title="one linear layer's delta")
    for name in ("dtype", "hidden", "rank", "tokens", "adapters", "own GEMM", "chosen"):
        table.add_column(name, justify="right")
    for name in ("grouped", "float32", "dense", "gathered", "copies", "invariant"):
        table.add_column(name, justify="right")
    for name in ("best of", "wall", "of copies", "kept", "bare"):
        table.add_column(name, justify="right")
    for one in found:
        copies = one.copies.microseconds("copies") if one.copies else None
        times = [one.ways.microseconds(way) if way in one.ways else None for way in WAYS]
        invariant = one.ways.microseconds("invariant") if "invariant" in one.ways else None
        all_times = (one.gemm.microseconds("gemm"), one.ways.microseconds("chosen"), *times)
        beside = (one.of_copies, one.of_kept, one.bare_of_copies)
        table.add_row(
            *(str(part).removeprefix("torch.") for part in one.cell),
            *("" if time is None else f"{time:,.0f}" for time in (*all_times, copies, invariant)),
            f"{one.of_best:.2f}{'*' if one.is_second else ''}",
            f"{one.of_best_by_wall:.2f}",
            *("" if ratio is None else f"{ratio:.3f}" for ratio in beside),
        )
    return table
