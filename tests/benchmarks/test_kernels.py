"""The CPU kernels' figures: works that compute the same, and ratios within a round."""

import pytest
import torch

from benchmarks.kernel_cells import Bench, Cell, cells
from benchmarks.kernels import BEST_MAX, REPEATED_SECONDS, SECONDS, CellComparison, measure_cell
from benchmarks.rounds import Rounds, Sample, interleave

CELLS = [
    Cell(dtype, 48, 8, tokens, 4)
    for dtype in (torch.float32, torch.bfloat16)
    for tokens in (8, 128)
]


def works_of(cell: Cell) -> dict[str, tuple[Bench, object]]:
    """Return each work with its own bench, because all of them write."""
    found = {}
    for name in (
        "chosen",
        "invariant",
        *Bench(cell).strategies(),
        "copies",
        "kept",
        *Bench(cell).bare(),
    ):
        bench = Bench(cell)
        known = {
            "chosen": bench.chosen,
            "invariant": lambda bench=bench: bench.chosen(batch_invariant=True),
            "copies": lambda bench=bench: bench.copies,
            "kept": bench.copies_kept,
        }
        of_cell = {**bench.strategies(), **(bench.bare() if cell.is_prefill else {})}
        if name in known or name in of_cell:
            found[name] = (bench, known[name]() if name in known else of_cell[name])
    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.text)
def test_all_compared_works_compute_the_same_delta(cell: Cell) -> None:
    before = Bench(cell).y.double()
    deltas = {}
    for name, (bench, work) in works_of(cell).items():
        work()
        deltas[name] = bench.y.double() - before
    bound = 1e-5 if cell.dtype == torch.float32 else 3e-2
    for name, delta in deltas.items():
        error = (delta - deltas["copies"]).norm() / deltas["copies"].norm()
        assert error < bound, name
    assert set(deltas) > {"looped", "batched", "chosen", "invariant", "kept"}
    assert ("bare batched" in deltas) == cell.is_prefill


def test_every_specified_cell_is_measured() -> None:
    assert len(cells()) == 72
    assert all(cell.adapters <= cell.tokens for cell in cells())


def rounds(**own: list[float]) -> Rounds:
    """Return rounds whose process times and wall times are equal."""
    return Rounds({name: [Sample(s, s) for s in seconds] for name, seconds in own.items()})


def test_a_ratio_is_of_times_from_the_same_round() -> None:
    # The machine is four times as slow in the last two rounds, and one sample was interrupted.
    found = rounds(ours=[2.0, 2.0, 90.0, 8.0, 8.0], theirs=[1.0, 1.0, 1.0, 4.0, 4.0])
    assert found.ratio("ours", "theirs") == 2.0
    assert found.microseconds("theirs") == 1e6


def test_a_ratio_is_of_process_time_and_has_a_counterpart_in_wall_time() -> None:
    samples = {"ours": [Sample(1.0, 6.0)], "theirs": [Sample(2.0, 2.0)]}
    assert Rounds(samples).ratio("ours", "theirs") == 0.5
    assert Rounds(samples).wall_ratio("ours", "theirs") == 3.0


def test_the_best_strategy_is_the_one_with_the_worst_ratio() -> None:
    strategies = rounds(chosen=[3.0], looped=[2.5], batched=[2.0], invariant=[1.0])
    gemm = rounds(chosen=[3.0], gemm=[100.0])
    copies = Rounds(
        {
            name: [Sample(seconds, seconds)]
            for name, seconds in [
                *[("chosen", 3.0), ("copies", 40.0), ("kept", 20.0)],
                *[("bare batched", 2.0), ("bare looped", 4.0)],
            ]
        }
    )
    one = CellComparison(CELLS[1], strategies, gemm, copies, is_repeated=False)
    assert (one.best, one.vs_best) == ("batched", 1.5)
    assert (one.vs_copies, one.vs_kept, one.bare_vs_copies) == (0.075, 0.15, 0.05)
    assert one.vs_best > BEST_MAX
    assert one.misses_target


def test_works_are_interleaved_and_each_runs_untimed_first() -> None:
    calls: list[str] = []
    found = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 0.01)
    assert set(found.names) == {"a", "b"}
    assert {"a", "b"} <= set(calls)
    assert "c" not in found


@pytest.mark.parametrize(
    ("ratios", "counted"), [([1.2], 1.2), ([1.5, 1.1], 1.1), ([1.5, 1.6], 1.6), ([1.4, 1.4], 1.4)]
)
def test_a_cell_that_misses_a_target_is_measured_again(ratios: list[float], counted: float) -> None:
    left = list(ratios)

    def compare(cell: Cell, seconds: float, *, is_repeated: bool) -> CellComparison:
        assert seconds == (REPEATED_SECONDS if is_repeated else SECONDS)
        strategies = rounds(chosen=[left.pop(0)], looped=[1.0])
        return CellComparison(
            cell, strategies, rounds(chosen=[1.0], gemm=[10.0]), None, is_repeated
        )

    found = measure_cell(CELLS[0], compare)
    assert (found.vs_best, found.is_repeated, left) == (counted, len(ratios) == 2, [])
