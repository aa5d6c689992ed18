"""The figures `kernels.*`: LoRA arithmetic on a CPU, against the base layer and other methods.

A figure is the worst cell; the whole table is printed. A cell that misses a target is measured
again, longer and in new memory, and the second result counts in any case.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure
from benchmarks.kernel_cells import STRATEGIES, Bench, Cell, cells
from benchmarks.rounds import Rounds, interleave, threads

DELTA_MAX, BEST_MAX, GATHER_MAX = 0.35, 1.3, 0.1
SECONDS: Final = 0.6
"""The approximate duration of a cell's measurement."""
REPEATED_SECONDS: Final = 3.0
"""The duration for a cell that missed a target."""
NOTE: Final = """\
One thread. Microseconds are medians of process time; a ratio is the median over the rounds. 'best
of': the chosen strategy over each other strategy, the worst of these; 'wall': the same in wall
time. 'copies': over a weight copy per token; 'kept': over the same with the copies' memory reused;
'bare': the fewest PyTorch calls that compute the delta, over 'copies'. '*': missed a target at
first, so measured again for {times} times as long and in new memory; the second result counts."""


class CellComparison(NamedTuple):
    """The measurements of one cell; `copies` is None below `kernel_cells.PREFILL_TOKENS`.

    `gemm`: None where only the strategies are compared.
    """

    cell: Cell
    strategies: Rounds
    gemm: Rounds | None
    copies: Rounds | None
    is_repeated: bool

    @property
    def best(self) -> str:
        """The strategy against which the chosen one is the slowest."""
        return max(self._strategies, key=lambda strategy: self.strategies.ratio("chosen", strategy))

    @property
    def vs_best(self) -> float:
        """The ratio of the chosen strategy's time to that strategy's."""
        return self.strategies.ratio("chosen", self.best)

    @property
    def vs_best_by_wall(self) -> float:
        """The same ratio in wall time."""
        return self.strategies.wall_ratio("chosen", self.best)

    @property
    def vs_gemm(self) -> float:
        """The ratio of the chosen strategy's time to the base layer's own product."""
        return self.gemm.ratio("chosen", "gemm") if self.gemm else 0.0

    @property
    def vs_copies(self) -> float | None:
        """The ratio of the chosen strategy's time to a weight copy per token."""
        return self.copies.ratio("chosen", "copies") if self.copies else None

    @property
    def vs_kept(self) -> float | None:
        """The same ratio where the copies' memory is reused."""
        return self.copies.ratio("chosen", "kept") if self.copies else None

    @property
    def bare_vs_copies(self) -> float | None:
        """The ratio of the fastest bare PyTorch calls' time to a weight copy per token."""
        if self.copies is None:
            return None
        bare = [name for name in self.copies.names if name.startswith("bare")]
        return min(self.copies.ratio(name, "copies") for name in bare)

    @property
    def misses_target(self) -> bool:
        """Whether the cell misses any target."""
        is_slow = self.cell.has_gemm_target and self.vs_gemm > DELTA_MAX
        return is_slow or self.vs_best > BEST_MAX or (self.vs_copies or 0.0) > GATHER_MAX

    def time_of(self, name: str) -> float | None:
        """Return a work's microseconds; None if it was not measured in this cell."""
        return self.strategies.microseconds(name) if name in self.strategies else None

    @property
    def _strategies(self) -> list[str]:
        return [name for name in self.strategies.names if name in STRATEGIES]


def run() -> Iterator[Figure]:
    """Measure every figure of the group."""
    comparisons = _measure_cells()
    console = Console(width=190)
    console.print(_table(comparisons))
    console.print(NOTE.format(times=round(REPEATED_SECONDS / SECONDS)))
    yield _delta_vs_gemm(comparisons)
    yield _best_of(comparisons)
    yield _vs_gather(comparisons)
    yield _batch_invariant(comparisons)


def _measure_cells() -> list[CellComparison]:
    """Return the comparisons of all cells, on one thread."""
    with threads(1), torch.inference_mode():
        return [measure_cell(cell, _compare) for cell in cells()]


def measure_cell(cell: Cell, compare: Callable[..., CellComparison]) -> CellComparison:
    """Return the comparison of a cell that counts: the first, or the second after a miss."""
    first = compare(cell, SECONDS, is_repeated=False)
    return compare(cell, REPEATED_SECONDS, is_repeated=True) if first.misses_target else first


def _compare(cell: Cell, seconds: float, *, is_repeated: bool) -> CellComparison:
    bench = Bench(cell)
    chosen = bench.chosen()
    works = {"chosen": chosen, **bench.strategies()}
    if cell.measures_invariant:
        works["invariant"] = bench.chosen(batch_invariant=True)
    strategies = interleave(works, seconds)
    # Measured separately, because the base layer's weights evict all others from the caches.
    gemm = interleave({"chosen": chosen, "gemm": bench.gemm}, seconds / 4)
    copies = None
    if cell.is_prefill:
        works = {"copies": bench.copies, "kept": bench.copies_kept(), "chosen": chosen}
        copies = interleave({**works, **bench.bare()}, seconds)
    return CellComparison(cell, strategies, gemm, copies, is_repeated)


def _delta_vs_gemm(comparisons: list[CellComparison]) -> Figure:
    worst = max((c for c in comparisons if c.cell.has_gemm_target), key=lambda c: c.vs_gemm)
    assert worst.gemm is not None
    text = f"own GEMM: {worst.gemm.microseconds('gemm'):,.0f} us ({worst.cell.text})"
    return _figure("kernels.delta_vs_gemm", worst.gemm, text, worst.vs_gemm, DELTA_MAX)


def _best_of(comparisons: list[CellComparison]) -> Figure:
    worst = max(comparisons, key=lambda c: c.vs_best)
    best = worst.best
    text = (
        f"the best strategy, {best}: {worst.strategies.microseconds(best):,.0f} us "
        f"({worst.cell.text}); wall time {worst.vs_best_by_wall:.2f}"
    )
    return _figure("kernels.best_of", worst.strategies, text, worst.vs_best, BEST_MAX)


def _vs_gather(comparisons: list[CellComparison]) -> Figure:
    worst = max(comparisons, key=lambda c: c.vs_copies or 0.0)
    assert worst.copies is not None
    text = (
        f"a weight copy per token: {worst.copies.microseconds('copies'):,.0f} us "
        f"({worst.cell.text}); PyTorch's bare calls alone: {worst.bare_vs_copies:.3f}; "
        f"over copies in reused memory: {worst.vs_kept:.3f}"
    )
    return _figure("kernels.vs_gather", worst.copies, text, worst.vs_copies or 0.0, GATHER_MAX)


def _batch_invariant(comparisons: list[CellComparison]) -> Figure:
    measured = [c for c in comparisons if c.cell.measures_invariant]
    worst = max(measured, key=lambda c: c.strategies.ratio("invariant", "chosen"))
    times = worst.strategies
    text = f"without batch_invariant: {times.microseconds('chosen'):,.0f} us ({worst.cell.text})"
    ratio, aim = times.ratio("invariant", "chosen"), "reported, no target"
    value = times.microseconds("invariant")
    return Figure("kernels.batch_invariant", value, "us", text, ratio, aim, True)


def _figure(name: str, rounds: Rounds, text: str, ratio: float, ratio_max: float) -> Figure:
    value = rounds.microseconds("chosen")
    return Figure(name, value, "us", text, ratio, f"ratio <= {ratio_max}", ratio <= ratio_max)


def _table(comparisons: list[CellComparison]) -> Table:
    table = Table(title="one linear layer's delta")
    for name in ("dtype", "hidden", "rank", "tokens", "adapters", "own GEMM", "chosen"):
        table.add_column(name, justify="right")
    for name in ("looped", "float32", "batched", "copies", "invariant"):
        table.add_column(name, justify="right")
    for name in ("best of", "wall", "of copies", "kept", "bare"):
        table.add_column(name, justify="right")
    for one in comparisons:
        copies = one.copies.microseconds("copies") if one.copies else None
        assert one.gemm is not None
        of_base = (one.gemm.microseconds("gemm"), one.strategies.microseconds("chosen"))
        times = (*of_base, *(one.time_of(name) for name in STRATEGIES), copies)
        ratios = (one.vs_copies, one.vs_kept, one.bare_vs_copies)
        table.add_row(
            *(str(part).removeprefix("torch.") for part in one.cell),
            *(
                "" if time is None else f"{time:,.0f}"
                for time in (*times, one.time_of("invariant"))
            ),
            f"{one.vs_best:.2f}{'*' if one.is_repeated else ''}",
            f"{one.vs_best_by_wall:.2f}",
            *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        )
    return table
