"""Expand in every implementation: it adds or replaces at its offset, and writes nothing else."""

import pytest
import torch

from engine.kernels.operands import accumulator_dtype
from tests.support.kernels.kernel_cases import (
    BATCHES,
    ERRORS_MAX,
    NAMES_AND_DTYPES,
    Batch,
    Case,
    batch_name,
    error_of,
    kernels_of,
)

OFFSET = 5


def expected_rows(case: Case, x: torch.Tensor, y: torch.Tensor, add_inputs: bool) -> torch.Tensor:
    result = y.double().clone()
    for row, slot in enumerate(case.rows):
        first = OFFSET
        for index, width in enumerate(case.slices.out_features):
            if (slot, index) in case.weights:
                b = case.weights[slot, index][1].double()
                delta = b @ x[index, row, : b.shape[1]].double()
                columns = slice(first, first + width)
                result[row, columns] = delta + (result[row, columns] if add_inputs else 0)
            first += width
    return result


@pytest.mark.parametrize("add_inputs", [True, False], ids=["adds", "replaces"])
@pytest.mark.parametrize("batch", BATCHES, ids=batch_name)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_every_slice_is_added_to_its_columns(
    name: str, dtype: torch.dtype, batch: Batch, add_inputs: bool
) -> None:
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
    found = y.clone()
    kernels_of(name).expand(found, x, case.slices, case.groups, OFFSET, add_inputs)
    assert error_of(found, expected_rows(case, x, y, add_inputs)) <= ERRORS_MAX[dtype]
    untouched = [*range(OFFSET), *range(OFFSET + case.y.shape[1], y.shape[1])]
    assert torch.equal(found[:, untouched], y[:, untouched])
    assert torch.equal(found[case.base_rows], y[case.base_rows])
