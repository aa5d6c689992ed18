"""The experts' deltas in every implementation, against the sum written out pair by pair."""

from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.kernels import choose_kernels
from engine.kernels.expert_groups import ExpertGroups, group_experts, sort_by_expert
from engine.kernels.grouped import grouped_product
from engine.layout import ModuleKind
from tests.kernel_cases import (
    ERRORS_MAX,
    NAMES_AND_DTYPES,
    Case,
    Shape,
    error_of,
    groups_of,
    make_case,
    mixed_rows,
)

TOP_K = 3


class Routing(NamedTuple):
    """How many experts there are, and which ones `tokens` rows are sent to."""

    experts: int
    top_k_index: Tensor


def routed(tokens: int, experts: int, how: str, random: Random) -> Routing:
    """`spread`: to random experts; `one`: all to the last; `elsewhere`: some to other ranks'."""
    choices = {"spread": range(experts), "one": [experts - 1], "elsewhere": range(experts + 1)}
    picked = choices[how]
    # With one choice only a row goes there several times, which no router does but a kernel may.
    rows = [
        random.sample(picked, TOP_K) if len(picked) >= TOP_K else random.choices(picked, k=TOP_K)
        for _ in range(tokens)
    ]
    return Routing(experts, torch.tensor(rows, dtype=torch.int64).view(tokens, TOP_K))


def is_touched(case: Case, slot: int) -> bool:
    return any((slot, place) in case.weights for place in range(len(case.slices.columns)))


def groups_for(case: Case, routing: Routing, rows: list[int]) -> ExpertGroups | None:
    return group_experts(
        groups_of(rows), lambda slot: is_touched(case, slot), routing.top_k_index, routing.experts
    )


def expected(case: Case, routing: Routing, rows: list[int], y: Tensor, x: Tensor) -> Tensor:
    """Row `p` of `y` is the pair `p`; every pair's delta in float64."""
    result = y.double().clone()
    for pair, expert in enumerate(routing.top_k_index.flatten().tolist()):
        first, slot = 0, rows[pair // TOP_K]
        for place, width in enumerate(case.slices.out_features):
            if (slot, place) in case.weights and expert < routing.experts:
                a, b = (matrix[expert].double() for matrix in case.weights[slot, place])
                result[pair, first : first + width] += b @ (a @ x[pair].double())
            first += width
    return result


SHAPES = (
    Shape(48, (80,), 1, (16,), 0.0, ModuleKind.EXPERTS, 4),
    Shape(33, (7, 9), 3, (1, 3, 8), 0.2, ModuleKind.EXPERTS, 5),
    Shape(64, (24, 24), 9, (8,), 0.3, ModuleKind.EXPERTS, 16),
)


@pytest.mark.parametrize("how", ["spread", "one", "elsewhere"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
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
        choose_kernels("cpu", name).experts(views, case.x, case.slices, groups)
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
    kernels = choose_kernels("cpu", name)
    kernels.experts((found[:, ::2], found[:, 1::2]), case.x, case.slices, groups)
    together = torch.cat([found[:, ::2], found[:, 1::2]], dim=1)
    wanted = expected(case, routing, rows, case.y, case.x)
    assert error_of(together, wanted) < ERRORS_MAX[dtype]


def test_groups_are_pairs_sorted_by_slot_and_expert() -> None:
    random = Random(11)
    rows, routing = mixed_rows(random, 40, 6), routed(40, 7, "elsewhere", random)
    groups = group_experts(groups_of(rows), lambda slot: slot != 2, routing.top_k_index, 7)
    assert groups is not None
    experts = routing.top_k_index.flatten().tolist()
    keys = [(rows[pair // TOP_K], experts[pair], pair) for pair in groups.pairs.tolist()]
    kept = [
        (slot, experts[t * TOP_K + k], t * TOP_K + k)
        for t, slot in enumerate(rows)
        for k in range(TOP_K)
        if slot not in (-1, 2)
    ]
    assert keys == sorted(kept)
    for span, ends in zip(groups.spans, groups.ends.tolist(), strict=True):
        inside = keys[span.start : span.end]
        assert {slot for slot, _, _ in inside} == {span.slot}
        counted = [sum(expert <= e for _, expert, _ in inside) for e in range(7)]
        assert ends == counted


def test_a_batch_without_weights_here_has_no_groups() -> None:
    routing = routed(4, 5, "spread", Random(1))
    assert group_experts(groups_of([-1] * 4), lambda _: True, routing.top_k_index, 5) is None
    assert group_experts(groups_of([0, 1, 1, -1]), lambda _: False, routing.top_k_index, 5) is None


def test_all_pairs_are_sorted_by_expert_and_find_back() -> None:
    routing = routed(20, 6, "elsewhere", Random(2))
    order = sort_by_expert(routing.top_k_index, 6)
    flat = routing.top_k_index.flatten()
    assert torch.equal(order.experts, flat.sort(stable=True).values)
    assert torch.equal(order.experts[order.places], flat)
    assert torch.equal(order.tokens[order.places], torch.arange(60) // TOP_K)
    assert order.ends.tolist() == [int((flat <= expert).sum()) for expert in range(6)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(16, 8), (5, 16), (16, 3), (1, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_grouped_product_is_each_groups_own(
    dtype: torch.dtype, inner: int, outer: int, is_transposed: bool
) -> None:
    torch.manual_seed(inner)
    matrices = torch.randn(4, outer, inner).to(dtype)
    if is_transposed:
        matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    x = torch.randn(9, inner).to(dtype)
    x[7:] = torch.nan
    found = grouped_product(x, matrices, torch.tensor([3, 3, 4, 7], dtype=torch.int32))
    parts = [(0, 0, 3), (2, 3, 4), (3, 4, 7)]
    wanted = torch.cat([x[a:b].double() @ matrices[g].double().T for g, a, b in parts])
    assert error_of(found[:7], wanted) < ERRORS_MAX[dtype]
