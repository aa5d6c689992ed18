"""Shrink in every implementation: it writes its results and nothing else."""

import pytest
import torch

from engine.kernels.operands import accumulator_dtype
from tests.support.kernels.kernel_cases import (
    BATCHES,
    ERRORS_MAX,
    NAMES_AND_DTYPES,
    Batch,
    batch_name,
    error_of,
    kernels_of,
)


@pytest.mark.parametrize("batch", BATCHES, ids=batch_name)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_adapter_rows_get_their_own_rank_and_nothing_else_is_written(
    name: str, dtype: torch.dtype, batch: Batch
) -> None:
    case = batch.case(dtype)
    slices, rank_max = len(case.slices.columns), max(batch.shape.ranks)
    accumulator = accumulator_dtype(dtype)
    found = torch.full((slices, batch.tokens, rank_max), torch.nan, dtype=accumulator)
    kernels_of(name).shrink(found, case.x, case.slices, case.groups, 2.0)
    expected = torch.full(found.shape, torch.nan, dtype=torch.float64)
    for row, slot in enumerate(case.rows):
        for index in range(slices):
            if (slot, index) in case.weights:
                a = case.weights[slot, index][0].double()
                expected[index, row, : len(a)] = 2 * (a @ case.x[row].double())
    assert torch.equal(found.isnan(), expected.isnan())
    assert error_of(found.nan_to_num(), expected.nan_to_num()) <= ERRORS_MAX[dtype]
