"""Shrink and expand in every implementation: each alone, and both with an exchange between them."""

import pytest
import torch
from torch import Tensor

from loradock.engine.kernels.operands import LoRASlices, accumulator_dtype
from loradock.engine.layout import ModuleShape, Shard
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.punica.wrapper import ShrinkExpand
from loradock.engine.residency.arena import Arena
from tests.support.engine.engine_examples import relative_error
from tests.support.kernels.kernel_cases import (
    BATCHES,
    ERRORS_MAX,
    NAMES,
    NAMES_AND_DTYPES,
    Batch,
    Case,
    batch_name,
    error_of,
    kernels_of,
)

FIRST = 5
"""The first column of the outputs in a wider tensor, as ranks that gather outputs have."""
IN, OUT, RANK_MAX, PARTS = 40, 24, 8, 2
RANKS = (4, 8)
SLOT_OF_ROW = (1, 0, -1, 1, 0, 0)


@pytest.mark.parametrize("batch", BATCHES, ids=batch_name)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_adapter_rows_get_their_own_rank_and_nothing_else_is_written(
    name: str, dtype: torch.dtype, batch: Batch
) -> None:
    case = batch.case(dtype)
    slices, rank_max = len(case.slices.columns), max(batch.shape.ranks)
    accumulator = accumulator_dtype(dtype)
    found = torch.full((slices, batch.tokens, rank_max), torch.nan, dtype=accumulator)
    kernels_of(name).shrink(found, case.x, case.slices, case.groups)
    expected = torch.full(found.shape, torch.nan, dtype=torch.float64)
    for row, slot in enumerate(case.rows):
        for index in range(slices):
            if (slot, index) in case.weights:
                a = case.weights[slot, index][0].double()
                expected[index, row, : len(a)] = a @ case.x[row].double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert error_of(found.nan_to_num(), expected.nan_to_num()) <= ERRORS_MAX[dtype]


def expected_rows(case: Case, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = y.double().clone()
    for row, slot in enumerate(case.rows):
        first = FIRST
        for index, width in enumerate(case.slices.out_features):
            if (slot, index) in case.weights:
                b = case.weights[slot, index][1].double()
                delta = b @ x[index, row, : b.shape[1]].double()
                result[row, first : first + width] += delta
            first += width
    return result


@pytest.mark.parametrize("batch", BATCHES, ids=batch_name)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_every_slice_is_added_to_its_columns(name: str, dtype: torch.dtype, batch: Batch) -> None:
    case = batch.case(dtype)
    generator = torch.Generator().manual_seed(5)
    shape = (len(case.slices.columns), batch.tokens, max(batch.shape.ranks))
    # Columns after a row's own rank, and rows of the base model, must not be read.
    x = torch.full(shape, torch.nan, dtype=accumulator_dtype(dtype))
    for row, slot in enumerate(case.rows):
        for index in range(shape[0]):
            if (slot, index) in case.weights:
                rank = case.weights[slot, index][1].shape[1]
                x[index, row, :rank] = torch.randn(rank, generator=generator).to(x.dtype)
    y = torch.randn(batch.tokens, case.y.shape[1] + 9, generator=generator).to(dtype)
    found, end = y.clone(), FIRST + case.y.shape[1]
    kernels_of(name).expand(found[:, FIRST:end], x, case.slices, case.groups)
    assert error_of(found, expected_rows(case, x, y)) <= ERRORS_MAX[dtype]
    untouched = [*range(FIRST), *range(end, y.shape[1])]
    assert torch.equal(found[:, untouched], y[:, untouched])
    assert torch.equal(found[case.base_rows], y[case.base_rows])


def shrink_expand_of(arena: Arena, first: int) -> ShrinkExpand:
    """Return an A without outputs and a B without inputs, as for striped ranks."""
    shrink = LoRASlices(arena.directory, (first,), IN, (0,))
    return ShrinkExpand(
        shrink, LoRASlices(arena.directory, (first + 1,), 0, (OUT // PARTS,)), PARTS
    )


@pytest.mark.parametrize("name", NAMES)
def test_shrink_and_expand_with_an_exchange_make_the_whole_product(name: str) -> None:
    """The columns of two ranks are in one arena, and the test performs the exchange."""
    share = OUT // PARTS
    shapes = [
        ModuleShape(
            *(f"rank{part}", IN, OUT, 2 * part),
            shard=Shard(None, (range(part * share, (part + 1) * share),), PARTS, part),
        )
        for part in range(PARTS)
    ]
    arena = Arena(len(RANKS), shapes, 1 << 16, torch.float32, "cpu")
    arena.data.fill_(float("nan"))
    torch.manual_seed(1)
    pairs = [(torch.randn(rank, IN), torch.randn(OUT, rank)) for rank in RANKS]
    for slot, (a, b) in enumerate(pairs):
        for shape in shapes:
            parts = (shape.shard.select_a(a).clone(), shape.shard.select_b(b).clone())
            arena.write_slice(slot, shape.index, *parts)
    punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, kernels_of(name))
    ids = torch.tensor(SLOT_OF_ROW) + 1
    punica.update_metadata(LoRAMapping(ids, ids), [1, 2])
    x, base = torch.randn(len(ids), IN), torch.randn(len(ids), OUT)
    by_rank = [shrink_expand_of(arena, shape.index) for shape in shapes]
    shrunk: list[Tensor] = []
    for slices in by_rank:
        buffer = torch.zeros(1, len(ids), RANK_MAX // PARTS)
        kernels_of(name).shrink(buffer, x, slices.shrink, punica.groups_of(len(ids)))
        shrunk.append(buffer)
    whole = torch.stack(shrunk, -1).flatten(-2)
    found = []
    for part, slices in enumerate(by_rank):
        y = base[:, part * share : (part + 1) * share].contiguous()

        def exchange(own: Tensor, part: int = part) -> Tensor:
            assert torch.equal(own, shrunk[part])
            return whole

        punica.add_lora_shrink_expand(y, x, slices, exchange)
        found.append(y)
    expected = base.clone()
    for row, slot in enumerate(SLOT_OF_ROW):
        if slot >= 0:
            expected[row] += x[row] @ pairs[slot][0].T @ pairs[slot][1].T
    assert relative_error(torch.cat(found, -1), expected) < 1e-5
    arena.close()
