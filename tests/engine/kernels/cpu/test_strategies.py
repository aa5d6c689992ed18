"""The CPU implementation's own parts: strategies, blocks, scratch memory and the choice."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from loradock.engine.kernels.cpu.blocks import (
    BLOCK_ROWS,
    LONG_ROWS,
    PADDED_ROWS,
    BatchTiler,
    Block,
    BlockPart,
    block_rows,
    equal_parts,
    min_long_rows,
    tile_by_length,
    tile_padded,
)
from loradock.engine.kernels.cpu.costs import Strategy, cheapest_strategy, estimate
from loradock.engine.kernels.cpu.dense import Dense
from loradock.engine.kernels.cpu.gathered import Gathered
from loradock.engine.kernels.cpu.grouped import Grouped
from loradock.engine.kernels.cpu.layer_block import (
    LayerBlock,
    SliceWeights,
    computation_dtypes,
    layer_block,
)
from loradock.engine.kernels.cpu.linear import CpuLinear
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import Groups, LoRAPair
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    Shape,
    error_of,
    expected_output,
    groups_of,
    kernels_of,
    make_case,
    mixed_rows,
)


def blocks_of(groups: Groups) -> list[Block]:
    """Return all of a batch's rows in blocks that strategies accept, including long groups."""
    runs, blocks = tile_by_length(groups)
    return [
        *blocks,
        *(Block((BlockPart(run.slot, run.size, run.size),), run.first, run.rows) for run in runs),
    ]


def dtypes_of(layer: LayerBlock) -> list[torch.dtype]:
    return computation_dtypes(layer.activation_dtype, layer.weight_dtype)


UNEQUAL = Shape(33, (7, 50, 1), 5, (1, 3, 8, 24))
EQUAL = Shape(130, (24, 100), 5, (16,), 0.0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [UNEQUAL, EQUAL], ids=["unequal ranks", "equal ranks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", [Grouped, Dense, Gathered])
def test_every_strategy_is_right_in_every_offered_dtype(
    strategy: type[Strategy], dtype: torch.dtype, shape: Shape
) -> None:
    for tokens in (1, 2, 7, 64):
        rows = mixed_rows(Random(tokens), tokens, shape.slots)
        case = make_case(shape, rows, dtype, tokens)
        for scale in (1.0, -0.5):
            scratch = Scratch()
            for block in blocks_of(case.groups):
                layer = layer_block(case.slices, block, dtype)
                if layer is None or (strategy is Gathered and not Gathered.can_run(layer)):
                    continue
                for computed in dtypes_of(layer):
                    found = case.y.clone()
                    strategy(layer, computed, scratch).run(found, case.x, scale)
                    own = block_rows(block)
                    expected = expected_output(case, scale)[own]
                    assert error_of(found[own], expected) <= ERRORS_MAX[dtype]
                    others = [row for row in range(tokens) if row not in own.tolist()]
                    assert torch.equal(found[others], case.y[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", [Grouped, Dense, Gathered])
def test_adjacent_groups_of_equal_size_are_added_to_their_rows(
    strategy: type[Strategy], dtype: torch.dtype
) -> None:
    shape = Shape(70, (90,), 3, (8,), 0.0)
    for rows in (
        *([1, 1, 0, 0, 2, 2], [-1, 0, 0, 2, 2, -1], [-1, 0, 1, 1, 2, 2]),
        *([0] * 40 + [2] * 40, [0] * 40 + [1] * 35, [0, 2] * 36),
    ):
        case = make_case(shape, rows, dtype, 5)
        for wide in (False, True):
            y = torch.full((len(rows), 100), torch.nan, dtype=dtype)
            found = y[:, 5:95].copy_(case.y) if wide else case.y.clone()
            for block in tile_by_length(case.groups, len(rows)).blocks:
                layer = layer_block(case.slices, block, dtype)
                assert layer is not None
                strategy(layer, dtypes_of(layer)[0], Scratch()).run(found, case.x, -0.5)
            assert error_of(found, expected_output(case, -0.5)) <= ERRORS_MAX[dtype]
            assert torch.equal(found[case.base_rows], case.y[case.base_rows])
            assert not wide or y[:, :5].isnan().all()


@pytest.mark.parametrize("outputs", [(32,), (24, 8)])
@pytest.mark.parametrize("slots", [[0] * 4 + [1] * 4, [0] * 4 + [1] * 3, [0, 1] * 4])
@pytest.mark.parametrize("strategy", [Grouped, Dense, Gathered])
def test_costs_know_which_deltas_are_added_where_they_are_computed(
    strategy: type[Strategy], slots: list[int], outputs: tuple[int, ...]
) -> None:
    case = make_case(Shape(32, outputs, 2, (8,), 0.0), slots, torch.float32, 1)
    [block] = tile_by_length(case.groups).blocks
    layer, scratch = layer_block(case.slices, block, torch.float32), Scratch()
    assert layer is not None
    prepared = strategy(layer, torch.float32, scratch)
    delta = scratch._buffers["delta", torch.float32].fill_(torch.nan)
    prepared.run(case.y, case.x, 1.0)
    assert bool(delta.isnan().all()) == strategy.adds_in_place(layer, torch.float32)


@pytest.mark.parametrize("outputs", [(32,), (24, 80)])
@pytest.mark.parametrize("ranks", [(8,), (4, 8, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [Grouped, Dense, Gathered])
def test_costs_know_how_much_is_copied(
    strategy: type[Strategy], dtype: torch.dtype, ranks: tuple[int, ...], outputs: tuple[int, ...]
) -> None:
    case = make_case(Shape(48, outputs, 3, ranks, 0.0), [0, 1, 2] * 3, dtype, 1)
    [block] = tile_by_length(case.groups).blocks
    layer = layer_block(case.slices, block, dtype)
    assert layer is not None
    if strategy is Gathered and not Gathered.can_run(layer):
        return
    for computed in dtypes_of(layer):
        scratch = Scratch()
        strategy(layer, computed, scratch).run(case.y, case.x, 1.0)
        copies = [scratch._buffers.get((use, computed), torch.empty(0)) for use in ("a", "b")]
        assert strategy.copied_bytes(layer, computed) == sum(copy.nbytes for copy in copies)
    pairs = [pair for weights in layer.slices for pair in weights.present]
    assert layer.weight_bytes == sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)


@pytest.mark.parametrize(("dtype", "long"), [(torch.float32, LONG_ROWS), (torch.bfloat16, 128)])
def test_the_length_of_a_long_group_depends_on_the_dtype(dtype: torch.dtype, long: int) -> None:
    assert min_long_rows(dtype) == long
    tiler = BatchTiler(batch_invariant=False)
    groups = groups_of([0] * (long - 1) + [1] * long)
    runs, blocks = tiler(groups, min_long_rows(dtype))
    assert [run.slot for run in runs] == [1]
    assert [part.slot for block in blocks for part in block.parts] == [0]
    assert tiler(groups, 1).blocks == ()
    assert tiler(groups, min_long_rows(dtype)).runs is runs


@pytest.mark.parametrize(
    ("places", "runs"),
    [
        ([0, 1, 2, 3], [(0, 4)]),
        ([1, 3, 5], [(0, 3)]),
        ([0, 1, 4, 5], [(0, 2), (2, 2)]),
        ([3, 0, 1, 2], [(0, 1), (1, 3)]),
        ([3, 2, 1], [(0, 1), (1, 1), (2, 1)]),
        ([2], [(0, 1)]),
    ],
)
def test_weights_at_equal_distances_are_one_tensor(
    places: list[int], runs: list[tuple[int, int]]
) -> None:
    inputs, outputs, rank, rows = 24, 40, 4, 2
    size = rank * (inputs + outputs) + 32
    arena = torch.randn(6 * size)
    pairs = tuple(
        LoRAPair(
            arena[place * size :][: rank * inputs].view(rank, inputs),
            arena[place * size + rank * inputs :][: rank * outputs].view(outputs, rank),
        )
        for place in places
    )
    weights = SliceWeights(0, inputs, outputs, pairs)
    assert [(run.first, run.parts) for run in weights.strided_runs] == runs
    parts = tuple(BlockPart(slot, rows, rows) for slot in range(len(places)))
    layer = LayerBlock(Block(parts, 0, None), (weights,), arena.dtype, arena.dtype)
    x, y = torch.randn(len(places) * rows, inputs), torch.zeros(len(places) * rows, outputs)
    Gathered(layer, arena.dtype, Scratch()).run(y, x, 2.0)
    expected = [2.0 * own @ a.T @ b.T for own, (a, b) in zip(x.split(rows), pairs, strict=True)]
    assert error_of(y, torch.cat(expected)) <= ERRORS_MAX[torch.float32]


ROWS = st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 90)), max_size=12).map(
    lambda runs: [slot for slot, length in runs for _ in range(length)]
)


@given(rows=ROWS, shuffled=st.booleans())
def test_every_row_of_an_adapter_is_in_one_run_or_block(rows: list[int], shuffled: bool) -> None:
    if shuffled:
        Random(len(rows)).shuffle(rows)
    groups = groups_of(rows)
    expected = [row for row, slot in enumerate(rows) if slot >= 0]
    runs, blocks = tile_by_length(groups)
    assert tile_padded(groups).runs == ()
    own_runs = [range(r.first, r.end) if r.rows is None else r.rows.tolist() for r in runs]
    in_runs = [row for run in own_runs for row in run]
    assert all(
        {rows[row] for row in own} == {r.slot} for own, r in zip(own_runs, runs, strict=True)
    )
    in_blocks = rows_in([*blocks], rows)
    assert sorted([*in_runs, *in_blocks]) == expected
    assert sorted(rows_in([equal_parts(block) for block in blocks], rows)) == sorted(in_blocks)
    assert sorted(rows_in([*tile_padded(groups).blocks], rows)) == expected
    written = [row for piece in BatchTiler(True).slot_rows(groups) for row in piece.writes.tolist()]
    assert sorted(written) == expected


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


@given(rows=ROWS)
def test_gathered_blocks_and_padded_parts_are_bounded(rows: list[int]) -> None:
    groups = groups_of(rows)
    runs, blocks = tile_by_length(groups)
    assert all(block.size <= BLOCK_ROWS for block in (*blocks, *tile_padded(groups).blocks))
    assert all(len(run.rows) <= BLOCK_ROWS for run in runs if run.rows is not None)
    assert {size for block in tile_padded(groups).blocks for size in block.sizes} <= {PADDED_ROWS}


def test_contiguous_rows_are_not_gathered() -> None:
    for rows in ([0] * 4, [0, 0, 1, 1, 2], [-1] * 3 + [2] * 500, [1] * 40 + [-1] * 2 + [1] * 40):
        runs, blocks = tile_by_length(groups_of(rows))
        assert all(one.rows is None for one in (*runs, *blocks))
        assert bool(runs) == (len(rows) >= LONG_ROWS)
    assert tile_by_length(groups_of([0, 1, 0, 1])).blocks[0].rows is not None
    assert tile_by_length(groups_of([0, 1] * 40)).runs[0].rows is not None


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
        linear = CpuLinear(BatchTiler(batch_invariant=False), Scratch())
        with LargestResult(case.x, case.y, case.slices.directory.data) as largest:
            linear(case.y, case.x, case.slices, groups, 1.0)
        assert 0 < largest.numbers <= max(bound, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cheapest_possible_strategy_is_chosen(dtype: torch.dtype) -> None:
    for shape in (UNEQUAL, EQUAL, Shape(1024, (1024,), 32, (16,), 0.0)):
        for rows in ([0] * 20, list(range(shape.slots)) * 2, [0] * 300 + [1, 2, 0]):
            case = make_case(shape, rows, dtype, 1)
            for block in blocks_of(case.groups):
                layer = layer_block(case.slices, block, dtype)
                assert layer is not None
                strategy, computed = cheapest_strategy(layer)
                chosen = estimate(strategy, layer, computed)
                offered: list[type[Strategy]] = [Grouped]
                if len(block.parts) > 1:
                    offered += [Dense, Gathered] if Gathered.can_run(layer) else [Dense]
                assert strategy in offered
                for other in offered:
                    assert chosen <= estimate(other, layer, dtypes_of(layer)[0])


def test_plans_depend_on_the_mapping_and_the_tensors() -> None:
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


def test_a_batch_is_tiled_once_for_tokens_and_once_for_sampled_rows() -> None:
    tiler = BatchTiler(batch_invariant=False)
    tokens, sampled = groups_of([0, 0, 1]), groups_of([0, 1])
    first = tiler(tokens), tiler(sampled)
    assert tiler(tokens) is first[0]
    assert tiler(sampled) is first[1]
