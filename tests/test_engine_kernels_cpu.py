"""What only the CPU's implementation has: strategies, blocks, scratch and the choice."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cpu.blocks import (
    BLOCK_ROWS,
    PADDED_ROWS,
    Cutter,
    cut,
    equal_parts,
    padded,
    pieces,
    rows_of,
)
from engine.kernels.cpu.costs import Plan, cheapest, dtypes, estimate
from engine.kernels.cpu.dense import Dense
from engine.kernels.cpu.gathered import Gathered
from engine.kernels.cpu.grouped import Grouped
from engine.kernels.cpu.layer import layer_block
from engine.kernels.cpu.linear import CpuLinear
from engine.kernels.cpu.scratch import Scratch
from tests.kernel_cases import (
    ERRORS_MAX,
    Shape,
    error_of,
    expected_output,
    groups_of,
    kernels_of,
    make_case,
    mixed_rows,
)

UNEQUAL = Shape(33, (7, 50, 1), 5, (1, 3, 8, 24))
EQUAL = Shape(130, (24, 100), 5, (16,), 0.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [UNEQUAL, EQUAL], ids=["unequal ranks", "equal ranks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", [Grouped, Dense, Gathered])
def test_every_strategy_is_right_in_every_dtype_that_it_is_offered(
    strategy: type[Plan], dtype: torch.dtype, shape: Shape
) -> None:
    for tokens in (1, 2, 7, 64):
        rows = mixed_rows(Random(tokens), tokens, shape.slots)
        case = make_case(shape, rows, dtype, tokens)
        for scale in (1.0, -0.5):
            scratch = Scratch()
            for block in cut(case.groups):
                layer = layer_block(case.slices, block, dtype)
                if layer is None or (strategy is Gathered and not Gathered.can_run(layer)):
                    continue
                for computed in dtypes(layer):
                    found = case.y.clone()
                    strategy(layer, computed, scratch).run(found, case.x, scale)
                    own = rows_of(block)
                    expected = expected_output(case, scale)[own]
                    assert error_of(found[own], expected) <= ERRORS_MAX[dtype]
                    others = [row for row in range(tokens) if row not in own.tolist()]
                    assert torch.equal(found[others], case.y[others])


ROWS = st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 90)), max_size=12).map(
    lambda runs: [slot for slot, length in runs for _ in range(length)]
)


@given(rows=ROWS, shuffled=st.booleans())
def test_blocks_hold_every_row_of_an_adapter_once(rows: list[int], shuffled: bool) -> None:
    if shuffled:
        Random(len(rows)).shuffle(rows)
    groups = groups_of(rows)
    whole = cut(groups)
    for blocks in (whole, padded(groups), [equal_parts(block) for block in whole]):
        found = []
        for block in blocks:
            assert sum(block.sizes) == block.size == len(rows_of(block))
            real = rows_of(block) if block.keep is None else rows_of(block)[block.keep]
            written = torch.cat([piece.writes for piece in pieces(block)])
            assert torch.equal(real, written)
            assert block.targets is None or torch.equal(block.targets, written)
            for piece in pieces(block):
                assert {rows[row] for row in piece.reads.tolist()} == {piece.slot}
            found += written.tolist()
        assert sorted(found) == [row for row, slot in enumerate(rows) if slot >= 0]


@given(rows=ROWS)
def test_gathered_blocks_and_padded_parts_are_bounded(rows: list[int]) -> None:
    groups = groups_of(rows)
    assert all(block.size <= BLOCK_ROWS for block in cut(groups) if block.rows is not None)
    assert all(block.size <= BLOCK_ROWS for block in padded(groups))
    assert {size for block in padded(groups) for size in block.sizes} <= {PADDED_ROWS}


def test_rows_that_lie_side_by_side_are_not_gathered() -> None:
    for rows in ([0] * 4, [0, 0, 1, 1, 2], [-1] * 3 + [2] * 500, [1] * 40 + [-1] * 2 + [1] * 40):
        assert all(block.rows is None for block in cut(groups_of(rows)))
    (scattered,) = cut(groups_of([0, 1, 0, 1]))
    assert scattered.rows is not None


class RecordedScratch(Scratch):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        taken = super().take(use, shape, dtype)
        self.sizes[use] = max(self.sizes.get(use, 0), taken.numel())
        return taken


def test_scratch_follows_the_rank_and_never_the_tokens_times_the_width() -> None:
    width = 48
    for runs, staged in ([0] * 4000 + [1] * 4000, 0), ([0, 1] * 4000, BLOCK_ROWS * width):
        case = make_case(Shape(width, (width,), 2, (4,), 0.0), runs, torch.float32, 1)
        scratch = RecordedScratch()
        linear = CpuLinear(Cutter(batch_invariant=False), scratch)
        linear(case.y, case.x, case.slices, case.groups, 1.0)
        assert scratch.sizes["shrunk"] <= 4000 * 4
        assert scratch.sizes["delta"] <= staged
        assert not staged or scratch.sizes["x"] <= staged


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_choice_is_the_cheapest_of_what_can_run(dtype: torch.dtype) -> None:
    for shape in (UNEQUAL, EQUAL, Shape(1024, (1024,), 32, (16,), 0.0)):
        for rows in ([0] * 20, list(range(shape.slots)) * 2, [0] * 300 + [1, 2, 0]):
            case = make_case(shape, rows, dtype, 1)
            for block in cut(case.groups):
                layer = layer_block(case.slices, block, dtype)
                assert layer is not None
                strategy, computed = cheapest(layer)
                chosen = estimate(strategy, layer, computed)
                offered: list[type[Plan]] = [Grouped]
                if len(block.parts) > 1:
                    offered += [Dense, Gathered] if Gathered.can_run(layer) else [Dense]
                assert strategy in offered
                for other in offered:
                    assert chosen <= estimate(other, layer, dtypes(layer)[0])


def test_plans_follow_the_mapping_and_the_tensors() -> None:
    shape = Shape(40, (24, 16), 3, (8,), 0.0)
    linear = kernels_of("cpu").linear
    cases = [make_case(shape, rows, torch.float32, 7) for rows in ([0, 1, 2], [2, -1, 0], [1] * 9)]
    slices = cases[0].slices
    groups = [case.groups for case in cases]
    for case, own in [*zip(cases, groups, strict=True)] * 2:
        for converted in (torch.float32, torch.float16):
            some = case._replace(x=case.x.to(converted), y=case.y.to(converted))
            found = some.y.clone()
            linear(found, some.x, slices, own, 1.0)
            assert error_of(found, expected_output(some)) <= ERRORS_MAX[converted]
