"""The embedding's delta in every implementation, against an explicit sum."""

from random import Random

import pytest
import torch

from loradock.engine.layout import ModuleKind
from tests.support.kernels.kernel_cases import (
    EMBEDDING_BATCHES,
    ERRORS_MAX,
    NAMES,
    NAMES_AND_DTYPES,
    REPEATS,
    Batch,
    Shape,
    batch_name,
    error_of,
    expected_output,
    kernels_of,
    make_case,
    mixed_rows,
    nan_in_new_memory,
)


@pytest.mark.parametrize("batch", EMBEDDING_BATCHES, ids=batch_name)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_the_delta_equals_the_explicit_sum(name: str, dtype: torch.dtype, batch: Batch) -> None:
    case = batch.case(dtype)
    found = case.y.clone()
    kernels_of(name).embedding(found, case.x, case.slices, case.groups, 0.5)
    assert error_of(found, expected_output(case, 0.5)) <= ERRORS_MAX[dtype]
    assert torch.equal(found[case.base_rows], case.y[case.base_rows])


@pytest.mark.parametrize("name", NAMES)
def test_unwritten_memory_is_not_read(name: str) -> None:
    shape = Shape(50, (37,), 3, (3, 8, 16), 0.2, ModuleKind.EMBEDDING)
    case = make_case(shape, mixed_rows(Random(8), 14, 3), torch.float32, seed=3)
    assert case.weights
    found = case.y.clone()
    with nan_in_new_memory():
        kernels_of(name).embedding(found, case.x, case.slices, case.groups, 1.0)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[torch.float32]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_invariant_row_has_the_same_bits_in_every_batch(name: str) -> None:
    random = Random(12)
    shape = Shape(50, (37,), 3, (3, 8, 16), 0.0, ModuleKind.EMBEDDING)
    case = make_case(shape, mixed_rows(random, 40, 3), torch.float32, seed=12)
    kernels = kernels_of(name, batch_invariant=True)
    whole = case.y.clone()
    kernels.embedding(whole, case.x, case.slices, case.groups, 1.0)
    for _ in range(REPEATS):
        some = random.sample(range(40), random.choice((1, 2, 3, 17, 39)))
        part = case.only(some)
        found = part.y.clone()
        kernels.embedding(found, part.x, part.slices, part.groups, 1.0)
        assert torch.equal(found, whole[some])
