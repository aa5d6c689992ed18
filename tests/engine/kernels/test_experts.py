"""The experts' deltas in every implementation, against an explicit sum over pairs."""

from random import Random

import pytest
import torch
from torch import Tensor

from loradock.engine.kernels import Kernels
from loradock.engine.kernels.expert_groups import sort_by_expert
from loradock.engine.layout import ModuleKind
from tests.support.kernels.expert_cases import (
    SHAPES,
    TOKENS,
    TOP_K,
    Routing,
    assert_batch_invariant,
    expected,
    groups_for,
    routed,
)
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    NAMES,
    NAMES_AND_DTYPES,
    Case,
    Shape,
    error_of,
    kernels_of,
    make_case,
    mixed_rows,
    nan_in_new_memory,
)


@pytest.mark.parametrize("how", ["spread", "one", "elsewhere"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.slots} slots")
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_every_pair_gets_its_slots_and_experts_delta(
    name: str, dtype: torch.dtype, shape: Shape, tokens: int, how: str
) -> None:
    random = Random(tokens + shape.slots)
    rows = mixed_rows(random, tokens, shape.slots)
    routing = routed(tokens, shape.experts, how, random)
    pairs = tokens * TOP_K
    case = make_case(shape, [-1] * pairs, dtype, seed=tokens)
    groups = groups_for(case, routing, rows)
    wanted = expected(case, routing, rows, case.y, case.x)
    found = case.y.clone()
    if groups is not None:
        views = found.split(shape.widths, dim=1)
        kernels_of(name).experts(views, case.x, case.slices, groups)
    assert error_of(found, wanted) < ERRORS_MAX[dtype]
    untouched = (wanted == case.y.double()).all(dim=1)
    assert torch.equal(found[untouched], case.y[untouched])


@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_outputs_may_be_columns_that_alternate(name: str, dtype: torch.dtype) -> None:
    shape = Shape(16, (8, 8), 2, (4,), 0.0, ModuleKind.EXPERTS, 3)
    random = Random(5)
    rows, routing = [0, 1, -1, 1], routed(4, 3, "spread", random)
    case = make_case(shape, [-1] * 12, dtype, seed=5)
    groups = groups_for(case, routing, rows)
    assert groups is not None
    found = torch.full((12, 16), torch.nan, dtype=dtype)
    found[:, ::2], found[:, 1::2] = case.y.split(8, dim=1)
    kernels = kernels_of(name)
    kernels.experts((found[:, ::2], found[:, 1::2]), case.x, case.slices, groups)
    together = torch.cat([found[:, ::2], found[:, 1::2]], dim=1)
    wanted = expected(case, routing, rows, case.y, case.x)
    assert error_of(together, wanted) < ERRORS_MAX[dtype]


LONG_GROUPS = Shape(40, (72, 24), 1, (9,), 0.0, ModuleKind.EXPERTS, 2)


@pytest.mark.parametrize("how", ["spread", "one"])
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_long_groups_and_base_rows_between_them(name: str, dtype: torch.dtype, how: str) -> None:
    random = Random(3)
    rows = [0, 0, -1, 0] * 12
    assert_right(name, dtype, LONG_GROUPS, rows, routed(len(rows), 2, how, random))


def assert_right(
    name: str, dtype: torch.dtype, shape: Shape, rows: list[int], routing: Routing
) -> None:
    case = make_case(shape, [-1] * routing.top_k_index.numel(), dtype, seed=7)
    found = added(kernels_of(name), case, routing, rows)
    wanted = expected(case, routing, rows, case.y, case.x)
    assert error_of(found, wanted) < ERRORS_MAX[dtype]
    base = [row for row, slot in enumerate(rows) for _ in range(TOP_K) if slot < 0]
    pairs = [TOP_K * row + k for row in set(base) for k in range(TOP_K)]
    assert torch.equal(found[pairs], case.y[pairs])


def added(kernels: Kernels, case: Case, routing: Routing, rows: list[int]) -> Tensor:
    groups = groups_for(case, routing, rows)
    assert groups is not None
    found = case.y.clone()
    kernels.experts(found.split(case.slices.out_features, dim=1), case.x, case.slices, groups)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_unwritten_memory_is_not_read(name: str) -> None:
    random = Random(8)
    rows = mixed_rows(random, 7, 3)
    with nan_in_new_memory():
        assert_right(name, torch.float32, SHAPES[1], rows, routed(7, 5, "elsewhere", random))


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_differ_from_the_pairs(name: str) -> None:
    random = Random(9)
    rows, routing = [0, -1, 1], routed(3, 5, "elsewhere", random)
    case = make_case(SHAPES[1]._replace(absent=0.0), [-1] * 9, torch.float32, seed=9)
    groups = groups_for(case, routing, rows)
    assert groups is not None
    row_of_pair = sort_by_expert(routing.top_k_index, 5).row_of_pair
    x, y = torch.full_like(case.x, torch.nan), torch.full_like(case.y, torch.nan)
    x[row_of_pair], y[row_of_pair] = case.x, case.y
    views = y.split(case.slices.out_features, dim=1)
    kernels_of(name).experts(views, x, case.slices, groups.with_rows(row_of_pair))
    wanted = expected(case, routing, rows, case.y, case.x)
    assert error_of(y[row_of_pair], wanted) < ERRORS_MAX[torch.float32]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_batch_has_the_same_bits(name: str) -> None:
    random = Random(10)
    rows, routing = mixed_rows(random, 20, 2), routed(20, 3, "spread", random)
    case = make_case(SHAPES[3], [-1] * 60, torch.float32, seed=10)
    kernels = kernels_of(name)
    first = added(kernels, case, routing, rows)
    assert torch.equal(first, added(kernels, case, routing, rows))
    assert torch.equal(first, added(kernels_of(name), case, routing, rows))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_invariant_pair_has_the_same_bits_in_every_batch(name: str) -> None:
    assert_batch_invariant(kernels_of(name, batch_invariant=True), added)
