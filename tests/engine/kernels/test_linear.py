"""The linear operation in every implementation, against an explicit sum; logits use it too."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.kernel_cases import (
    BATCHES,
    ERRORS_MAX,
    IS_INTERPRETED,
    NAMES,
    NAMES_AND_DTYPES,
    REPEATS,
    Batch,
    Case,
    Shape,
    batch_name,
    dtypes,
    error_of,
    expected_output,
    kernels_of,
    make_case,
    mixed_rows,
    nan_in_new_memory,
)


def run(name: str, case: Case) -> torch.Tensor:
    found = case.y.clone()
    kernels_of(name).linear(found, case.x, case.slices, case.groups)
    return found


@pytest.mark.parametrize("batch", BATCHES, ids=batch_name)
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_the_delta_equals_the_explicit_sum(name: str, dtype: torch.dtype, batch: Batch) -> None:
    case = batch.case(dtype)
    found = run(name, case)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[dtype]
    assert torch.equal(found[case.base_rows], case.y[case.base_rows])


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=2 * REPEATS)
def test_any_small_layer_and_batch(name: str, seed: int) -> None:
    random = Random(seed)
    widths = tuple(random.choice((1, 7, 32, 72)) for _ in range(random.randint(1, 3)))
    slots = random.choice((1, 2, 5, 65))
    absent = random.choice((0.0, 0.2, 0.7))
    shape = Shape(random.choice((1, 5, 33, 100)), widths, slots, (1, 3, 8, 16, 31), absent)
    rows = any_rows(random, slots)
    dtype = random.choice(dtypes(name))
    case = make_case(shape, rows, dtype, seed)
    found = run(name, case)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[dtype]
    assert torch.equal(found[case.base_rows], case.y[case.base_rows])


def any_rows(random: Random, slots: int) -> list[int]:
    """Return slots in random order, in order, or in runs, some of them long."""
    tokens = random.randint(1, 20) if IS_INTERPRETED else random.choice((1, 3, 20, 150, 300))
    rows = mixed_rows(random, tokens, slots)
    if random.random() < 0.5:
        lengths = [random.choice((1, 2, 5, 40, 140)) for _ in rows]
        rows = [slot for slot, length in zip(rows, lengths, strict=True) for _ in range(length)]
    return sorted(rows[:tokens]) if random.random() < 0.3 else rows[:tokens]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "rows",
    [[0] * 9, [2] * 9, [0] * 3 + [2] * 6, [-1] * 3 + [1] * 6, [0, 1, 2] * 3, [1, 1, -1, 1, 1]],
    ids=str,
)
def test_runs_of_rows_and_scattered_ones(name: str, rows: list[int]) -> None:
    case = make_case(Shape(40, (24, 16), 3, (8,), 0.0), rows, torch.float32, seed=7)
    found = run(name, case)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[torch.float32]
    assert torch.equal(found[case.base_rows], case.y[case.base_rows])


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_another_dtype_than_the_activations(name: str) -> None:
    case = BATCHES[6].case(torch.float32, weights_dtype=torch.float16)
    assert error_of(run(name, case), expected_output(case)) <= ERRORS_MAX[torch.float32]


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_be_strided(name: str) -> None:
    case = make_case(SHAPE_OF_TWO, [0, 1, -1, 1, 0, 0], torch.float32, seed=2)
    wide_x, wide_y = torch.full((6, 50), torch.nan), torch.full((6, 90), torch.nan)
    wide_x[:, 5:45], wide_y[:, 3:43] = case.x, case.y
    kernels = kernels_of(name)
    kernels.linear(wide_y[:, 3:43], wide_x[:, 5:45], case.slices, case.groups)
    assert error_of(wide_y[:, 3:43], expected_output(case)) <= ERRORS_MAX[torch.float32]
    assert wide_y[:, :3].isnan().all()
    assert wide_y[:, 43:].isnan().all()


SHAPE_OF_TWO = Shape(40, (24, 16), 2, (8, 5), 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_replaced_weights_of_a_slot_are_read(name: str) -> None:
    kernels = kernels_of(name)
    rows = [0, 1, 1, -1]
    old = make_case(SHAPE_OF_TWO, rows, torch.float32, seed=3)
    new = make_case(Shape(40, (24, 16), 2, (6, 3), 0.4), rows, torch.float32, seed=4)
    groups = old.groups
    kernels.linear(old.y.clone(), old.x, old.slices, groups)
    directory, later = old.slices.directory, new.slices.directory
    directory.data[: len(later.data)] = later.data
    directory.offsets.copy_(later.offsets)
    directory.ranks.copy_(later.ranks)
    directory.version += 1
    found = new.y.clone()
    kernels.linear(found, new.x, old.slices, groups)
    assert error_of(found, expected_output(new)) <= ERRORS_MAX[torch.float32]


@pytest.mark.parametrize("tokens", [3, 14])
@pytest.mark.parametrize("name", NAMES)
def test_unwritten_memory_is_not_read(name: str, tokens: int) -> None:
    shape = Shape(40, (24, 9), 3, (1, 8, 13), 0.2)
    case = make_case(shape, mixed_rows(Random(8), tokens, 3), torch.float32, seed=0)
    assert case.weights
    with nan_in_new_memory():
        found = run(name, case)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[torch.float32]


@pytest.mark.parametrize("bad_value", [torch.nan, torch.inf, 1e38])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_not_finite_or_overflows_changes_no_other(
    name: str, bad_value: float
) -> None:
    random = Random(5)
    for slots, tokens in ((2, 5),) if IS_INTERPRETED else ((2, 5), (9, 20), (3, 130)):
        rows = mixed_rows(random, tokens, slots)
        for dtype in (torch.float32,) if IS_INTERPRETED else (torch.float32, dtypes(name)[-1]):
            case = make_case(Shape(70, (40,), slots, (8,), 0.0), rows, dtype, seed=tokens)
            x = case.x.clone()
            x[tokens // 2] = bad_value
            found = run(name, case._replace(x=x))
            others = [row for row in range(tokens) if row != tokens // 2]
            expected = expected_output(case)
            assert error_of(found[others], expected[others]) <= ERRORS_MAX[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_batch_has_the_same_bits(name: str) -> None:
    case = BATCHES[-2].case(torch.float32)
    kernels, groups = kernels_of(name), case.groups
    results = []
    for _ in range(3):
        results.append(case.y.clone())
        kernels.linear(results[-1], case.x, case.slices, groups)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], run(name, case))


@pytest.mark.parametrize("dtype", [torch.float32, dtypes(NAMES[0])[-1]])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_invariant_row_has_the_same_bits_in_every_batch(
    name: str, dtype: torch.dtype
) -> None:
    random = Random(11)
    rows = mixed_rows(random, 70, 4)
    case = make_case(Shape(200, (72, 33), 4, (1, 5, 16), 0.1), rows, dtype, seed=11)
    kernels = kernels_of(name, batch_invariant=True)
    whole = case.y.clone()
    kernels.linear(whole, case.x, case.slices, case.groups)
    assert error_of(whole, expected_output(case)) <= ERRORS_MAX[dtype]
    for _ in range(REPEATS):
        some = random.sample(range(70), random.choice((1, 2, 3, 17, 40, 69)))
        part = case.only(some)
        found = part.y.clone()
        kernels.linear(found, part.x, part.slices, part.groups)
        assert torch.equal(found, whole[some])
