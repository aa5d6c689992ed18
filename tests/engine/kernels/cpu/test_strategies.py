"""The CPU implementation's own parts: its two strategies, blocks and scratch memory."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from loradock.engine.kernels.cpu.batched import Batched, can_batch
from loradock.engine.kernels.cpu.blocks import (
    BATCHED_GROUPS_MIN,
    BLOCK_ROWS,
    LONG_ROWS,
    PADDED_ROWS,
    BatchTiler,
    Block,
    BlockPart,
    Ranks,
    Tiling,
    block_rows,
    blocks_of,
    equal_parts,
    min_long_rows,
    padded_blocks,
    tile,
)
from loradock.engine.kernels.cpu.dtypes import CONVERTED_MAX, looped_dtype, native_dtype
from loradock.engine.kernels.cpu.linear import CpuProducts
from loradock.engine.kernels.cpu.looped import Looped
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.kernels.operands import LoRASlices
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    Case,
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


Strategy = Looped | Batched


def strategies_of(case: Case, block: Block, dtype: torch.dtype) -> dict[str, Strategy]:
    """Return every strategy for a block, in every dtype that it is computed in."""
    native = native_dtype(dtype, dtype)
    found: dict[str, Strategy] = {
        f"looped {computed}": Looped(block, case.slices, dtype, computed, Scratch())
        for computed in {native, looped_dtype(native, 1, 1)}
    }
    ranks = {case.slices.ranks(part.slot) for part in block.parts}
    if len(ranks) == 1:
        found["batched"] = Batched(equal_parts(block), case.slices, native, Scratch())
    return found


@pytest.mark.parametrize("shape", [UNEQUAL, EQUAL], ids=["unequal ranks", "equal ranks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_strategies_are_right_in_every_dtype(dtype: torch.dtype, shape: Shape) -> None:
    seen = set()
    for tokens in (1, 2, 7, 64, 300):
        rows = mixed_rows(Random(tokens), tokens, shape.slots)
        case = make_case(shape, rows, dtype, tokens)
        for block in blocks_of(case.groups, case.groups.spans):
            for name, strategy in strategies_of(case, block, dtype).items():
                seen.add(name)
                found = case.y.clone()
                strategy.run(found, case.x)
                own = block_rows(block)
                expected = expected_output(case)[own]
                assert error_of(found[own], expected) <= ERRORS_MAX[dtype], name
                others = [row for row in range(tokens) if row not in own.tolist()]
                assert torch.equal(found[others], case.y[others])
    assert ("batched" in seen) >= (shape is EQUAL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adjacent_groups_of_equal_size_are_added_to_their_rows(dtype: torch.dtype) -> None:
    shape = Shape(70, (90,), 3, (8,), 0.0)
    for rows in (
        *([1, 1, 0, 0, 2, 2], [-1, 0, 0, 2, 2, -1], [-1, 0, 1, 1, 2, 2]),
        *([0] * 40 + [2] * 40, [0] * 40 + [1] * 35, [0, 2] * 36),
    ):
        case = make_case(shape, rows, dtype, 5)
        [block] = blocks_of(case.groups, case.groups.spans)
        for name, strategy in strategies_of(case, block, dtype).items():
            for wide in (False, True):
                y = torch.full((len(rows), 100), torch.nan, dtype=dtype)
                found = y[:, 5:95].copy_(case.y) if wide else case.y.clone()
                strategy.run(found, case.x)
                expected = expected_output(case)
                assert error_of(found, expected) <= ERRORS_MAX[dtype], name
                assert torch.equal(found[case.base_rows], case.y[case.base_rows])
                assert not wide or y[:, :5].isnan().all()


@pytest.mark.parametrize(
    ("places", "is_batched"),
    [
        ([0, 1, 2, 3], True),
        ([1, 3, 5], True),
        ([0, 1, 4, 5], True),
        ([3, 0, 1, 2], True),
        ([3, 2, 1], False),
        ([5, 3, 1, 0], False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_at_equal_distances_are_multiplied_where_they_are(
    places: list[int], is_batched: bool, dtype: torch.dtype
) -> None:
    inputs, outputs, rank, rows = 64, 128, 4, 2
    size = rank * (inputs + outputs)
    directory = SlotDirectory(torch.randn(6 * size).to(dtype), len(places), 1)
    for slot, place in enumerate(places):
        column = torch.tensor([0])
        directory.write(slot, column, torch.tensor([place * size]), torch.tensor([rank]).int())
    slices = LoRASlices(directory, (0,), inputs, (outputs,))
    block = Block(tuple(BlockPart(slot, rows, rows) for slot in range(len(places))), 0, None)
    assert can_batch(block, slices, dtype) == (is_batched or dtype == torch.bfloat16)
    x, y = (torch.randn(len(places) * rows, width).to(dtype) for width in (inputs, outputs))
    wanted = y.double() + torch.cat(
        [
            own.double() @ pair.a.double().T @ pair.b.double().T
            for slot, own in enumerate(x.split(rows))
            for pair in slices.pairs(slot)
            if pair is not None
        ]
    )
    Batched(block, slices, dtype, Scratch()).run(y, x)
    assert error_of(y, wanted) <= ERRORS_MAX[dtype]


def tiling_of(rows: list[int], ranks: Ranks | None = None, in_place: bool = True) -> Tiling:
    groups = groups_of(rows)
    return tile(groups, ranks or ((8,),) * len(groups.spans), in_place, LONG_ROWS)


def slots_of(blocks: tuple[Block, ...]) -> list[list[int]]:
    return [[part.slot for part in block.parts] for block in blocks]


def test_short_groups_of_equal_ranks_and_similar_sizes_are_batched() -> None:
    rows = [0, 1, 2, 3] + [4] * LONG_ROWS + [5] * 6
    looped, batched = tiling_of(rows)
    assert slots_of(batched) == [[0, 1, 2, 3]]
    assert sorted(slots_of(looped)) == [[4], [5]]
    looped, batched = tiling_of(rows, ((8,), (4,), (8,), (4,), (8,), (8,)))
    assert slots_of(batched) == []
    assert sorted(slots_of(looped)) == [[0, 1, 2, 3, 5], [4]]
    looped, batched = tiling_of([0, 1, 2, 3], ((8, 0), (0, 0), (8, 0), (8, 0)))
    assert (slots_of(looped), slots_of(batched)) == ([], [[0, 2, 3]])
    assert slots_of(tiling_of([*range(BATCHED_GROUPS_MIN - 1)]).batched) == []


def test_the_threshold_of_a_long_group_depends_on_the_dtype() -> None:
    assert min_long_rows(torch.float32) < min_long_rows(torch.bfloat16)


def test_few_rows_of_small_bfloat16_weights_are_multiplied_in_float32() -> None:
    small = CONVERTED_MAX // 3
    for rows, weights, expected in (
        (1, small, torch.float32),
        (1, small + 1, torch.bfloat16),
        (8, small, torch.bfloat16),
        (128, CONVERTED_MAX // 130, torch.float32),
    ):
        assert looped_dtype(torch.bfloat16, rows, weights) == expected
        assert looped_dtype(torch.float32, rows, weights) == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows",
    [[0] * 300, [1] * 140 + [-1] * 3 + [0] * 150 + [2] * 130, [0, 2] * 140, [0] * 200 + [1, 2]],
)
def test_long_groups_are_right(dtype: torch.dtype, rows: list[int]) -> None:
    case = make_case(Shape(130, (24, 100), 3, (3, 16)), rows, dtype, 1)
    kernels_of("cpu").linear(case.y, case.x, case.slices, case.groups)
    expected = expected_output(make_case(Shape(130, (24, 100), 3, (3, 16)), rows, dtype, 1))
    assert error_of(case.y, expected) <= ERRORS_MAX[dtype]


ROWS = st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 90)), max_size=12).map(
    lambda runs: [slot for slot, length in runs for _ in range(length)]
)


RANKS = st.lists(st.sampled_from([(8,), (4,), (0,)]), min_size=5, max_size=5)


@given(rows=ROWS, ranks=RANKS, shuffled=st.booleans(), in_place=st.booleans())
def test_every_row_with_weights_is_in_one_block(
    rows: list[int], ranks: list[tuple[int, ...]], shuffled: bool, in_place: bool
) -> None:
    if shuffled:
        Random(len(rows)).shuffle(rows)
    groups = groups_of(rows)
    looped, batched = tile(groups, tuple(ranks[span.slot] for span in groups.spans), in_place, 32)
    expected = [row for row, slot in enumerate(rows) if slot >= 0 and any(ranks[slot])]
    unweighted = {slot for slot in range(5) if not any(ranks[slot])}
    found = [row for row in rows_in([*looped, *batched], rows) if rows[row] not in unweighted]
    assert sorted(found) == expected
    for block in batched:
        assert len({ranks[part.slot] for part in block.parts}) == 1
        assert len(set(block.sizes)) == 1
        assert block.size <= 2 * BLOCK_ROWS
    for block in looped:
        is_used_in_place = block.rows is None and in_place
        assert block.size <= BLOCK_ROWS or (is_used_in_place and len(block.parts) == 1)
    every = [row for row, slot in enumerate(rows) if slot >= 0]
    padded = padded_blocks(groups, groups.spans)
    assert sorted(rows_in([*padded], rows)) == every
    assert {size for block in padded for size in block.sizes} <= {PADDED_ROWS}
    written = [row for piece in BatchTiler(True).slot_rows(groups) for row in piece.writes.tolist()]
    assert sorted(written) == every


def rows_in(blocks: list[Block], rows: list[int]) -> list[int]:
    """Return the rows that blocks write, after checking that each belongs to its part's slot."""
    found = []
    for block in blocks:
        own = block_rows(block)
        real = own if block.real_indices is None else own[block.real_indices]
        assert block.real_rows is None or torch.equal(block.real_rows, real)
        slots = [part.slot for part in block.parts for _ in range(part.size)]
        assert [rows[row] for row in own.tolist()] == slots
        assert len(real) == sum(part.real_size for part in block.parts)
        found += real.tolist()
    return found


def test_contiguous_rows_are_not_gathered() -> None:
    for rows in ([0] * 4, [0, 0, 1, 1, 2], [-1] * 3 + [2] * 500, [1] * 40 + [-1] * 2 + [1] * 40):
        looped, batched = tiling_of(rows)
        assert all(block.rows is None for block in looped)
        assert not batched or len(rows) == 5
    assert tiling_of([0, 1, 0, 1]).looped[0].rows is not None
    assert tiling_of([0, 1] * 40).looped[0].rows is not None
    assert len(tiling_of([0] * 1000).looped) == 1
    assert len(tiling_of([0] * 1000, in_place=False).looped) == 4


class LargestResult(TorchDispatchMode):
    """The size of the largest tensor that an operation created, except for views of `known`."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, list | tuple) else [result]:
            is_new = isinstance(one, torch.Tensor)
            if is_new and one.untyped_storage().data_ptr() not in self._known:
                self.numbers = max(self.numbers, one.numel())
        return result


def test_memory_depends_on_the_rank_and_not_on_tokens_times_outputs() -> None:
    width, rank, tokens = 48, 4, 8000
    for rows, bound in [
        ([0] * 4000 + [1] * 4000, 4000 * rank),
        ([0, 1] * 4000, BLOCK_ROWS * width),
        (list(range(40)) * 200, BLOCK_ROWS * width),
    ]:
        case = make_case(Shape(width, (width,), 40, (rank,), 0.0), rows, torch.float32, 1)
        groups = case.groups
        products = CpuProducts(BatchTiler(batch_invariant=False), Scratch())
        with LargestResult(case.x, case.y, case.slices.directory.data) as largest:
            products.linear(case.y, case.x, case.slices, groups)
        assert 0 < largest.numbers <= max(bound, tokens)


def test_a_tiling_is_made_once_for_layers_of_equal_ranks() -> None:
    tiler, ranks = BatchTiler(batch_invariant=False), ((8,), (8,))
    tokens, sampled = groups_of([0, 0, 1]), groups_of([0, 1])
    first = [tiler(groups, ranks, True, LONG_ROWS) for groups in (tokens, sampled)]
    again = [tiler(groups, ranks, True, LONG_ROWS) for groups in (tokens, sampled)]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert tiler(tokens, ((8,), (4,)), True, LONG_ROWS) is not first[0]
