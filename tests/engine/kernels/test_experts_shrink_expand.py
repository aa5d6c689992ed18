"""Shrink and expand of experts in every implementation, with an exchange between them.

The intermediate is NaN wherever nothing was shrunk, so that reading it is detected.
"""

from random import Random

import pytest
import torch
from torch import Tensor

from loradock.engine.kernels import Kernels
from loradock.engine.kernels.expert_groups import ExpertGroups, group_experts
from loradock.engine.kernels.operands import LoRASlices, accumulator_dtype
from loradock.engine.layout import ModuleKind, ModuleShape, Shard
from loradock.engine.residency.arena import Arena
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
    IS_INTERPRETED,
    NAMES,
    NAMES_AND_DTYPES,
    Case,
    error_of,
    groups_of,
    kernels_of,
    make_case,
    mixed_rows,
)

RANK_CAPACITY = 48
"""The columns of the intermediate, more than any rank here."""


def shrunk(kernels: Kernels, case: Case, groups: ExpertGroups) -> Tensor:
    """Return the result of shrink: [slices, pairs, RANK_ROOM]."""
    shape = (len(case.slices.columns), len(groups.pairs), RANK_CAPACITY)
    buffer = torch.full(shape, torch.nan, dtype=accumulator_dtype(case.x.dtype))
    kernels.experts_shrink(buffer, case.x, case.slices, groups)
    return buffer


def added(kernels: Kernels, case: Case, routing: Routing, rows: list[int]) -> Tensor:
    groups = groups_for(case, routing, rows)
    assert groups is not None
    found = case.y.clone()
    views = found.split(case.slices.out_features, dim=1)
    kernels.experts_expand(views, shrunk(kernels, case, groups), case.slices, groups)
    return found


@pytest.mark.parametrize("how", ["elsewhere"] if IS_INTERPRETED else ["spread", "one", "elsewhere"])
@pytest.mark.parametrize("tokens", TOKENS[-1:] if IS_INTERPRETED else TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.slots} slots")
@pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES)
def test_shrink_and_expand_make_the_whole_product(name, dtype, shape, tokens, how) -> None:
    random = Random(tokens + shape.slots)
    rows = mixed_rows(random, tokens, shape.slots)
    routing = routed(tokens, shape.experts, how, random)
    case = make_case(shape, [-1] * (tokens * TOP_K), dtype, seed=tokens)
    if groups_for(case, routing, rows) is None:
        return
    found = added(kernels_of(name), case, routing, rows)
    wanted = expected(case, routing, rows, case.y, case.x)
    assert error_of(found, wanted) < ERRORS_MAX[dtype]
    untouched = (wanted == case.y.double()).all(dim=1)
    assert torch.equal(found[untouched], case.y[untouched])


@pytest.mark.parametrize("name", NAMES)
def test_shrunk_activations_are_in_the_groups_order_at_each_rank(name: str) -> None:
    shape = SHAPES[1]._replace(absent=0.4)
    random = Random(4)
    rows, routing = mixed_rows(random, 9, 3), routed(9, 5, "elsewhere", random)
    case = make_case(shape, [-1] * 27, torch.float32, seed=4)
    groups = groups_for(case, routing, rows)
    assert groups is not None
    wanted = torch.full((2, 27, RANK_CAPACITY), torch.nan, dtype=torch.float64)
    experts = routing.top_k_index.flatten().tolist()
    for index, pair in enumerate(groups.pairs.tolist()):
        for part in range(2):
            key = (rows[pair // TOP_K], part)
            if key in case.weights and experts[pair] < 5:
                a = case.weights[key][0][experts[pair]].double()
                wanted[part, index, : len(a)] = a @ case.x[pair].double()
    found = shrunk(kernels_of(name), case, groups)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert error_of(found.nan_to_num(), wanted.nan_to_num()) < ERRORS_MAX[torch.float32]


PARTS, EXPERTS, IN, OUT, RANKS = 2, 3, 40, 24, (4, 8)


def columns_of(arena: Arena, first: int) -> tuple[LoRASlices, LoRASlices]:
    """Return one rank's A without outputs, and its B without inputs."""
    kind = (ModuleKind.EXPERTS, EXPERTS)
    a = LoRASlices(arena.directory, (first,), IN, (0,), *kind)
    return a, LoRASlices(arena.directory, (first + 1,), 0, (OUT // PARTS,), *kind)


@pytest.mark.parametrize("name", NAMES)
def test_shards_of_striped_ranks_make_the_whole_product(name: str) -> None:
    share = OUT // PARTS
    shapes = [
        ModuleShape(
            *(f"rank{part}", IN, OUT, 2 * part),
            kind=ModuleKind.EXPERTS,
            experts=EXPERTS,
            shard=Shard(None, (range(part * share, (part + 1) * share),), PARTS, part),
        )
        for part in range(PARTS)
    ]
    arena = Arena(len(RANKS), shapes, 1 << 16, torch.float32, "cpu")
    arena.data.fill_(torch.nan)
    torch.manual_seed(1)
    pairs = [(torch.randn(EXPERTS, r, IN), torch.randn(EXPERTS, OUT, r)) for r in RANKS]
    for slot, (a, b) in enumerate(pairs):
        for shape in shapes:
            parts = (shape.shard.select_a(a).clone(), shape.shard.select_b(b).clone())
            arena.write_slice(slot, shape.index, *parts)
    rows, top_k_index = [1, 0, -1, 1], torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1]])
    groups = group_experts(groups_of(rows), lambda _: True, top_k_index, EXPERTS)
    assert groups is not None
    x, base = torch.randn(8, IN), torch.randn(8, OUT)
    kernels, pair = kernels_of(name), [columns_of(arena, shape.index) for shape in shapes]
    own = [torch.zeros(1, 8, max(RANKS) // PARTS) for _ in pair]
    for buffer, (a, _) in zip(own, pair, strict=True):
        kernels.experts_shrink(buffer, x, a, groups)
    whole = torch.stack(own, -1).flatten(-2)
    found = base.clone()
    for view, (_, b) in zip(found.split(share, dim=1), pair, strict=True):
        kernels.experts_expand((view,), whole, b, groups)
    wanted = base.double()
    for pair, expert in enumerate(top_k_index.flatten().tolist()):
        if rows[pair // 2] >= 0:
            a, b = (matrix[expert].double() for matrix in pairs[rows[pair // 2]])
            wanted[pair] += b @ (a @ x[pair].double())
    assert error_of(found, wanted) < ERRORS_MAX[torch.float32]
    arena.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_invariant_pair_has_the_same_bits_in_every_batch(name: str) -> None:
    assert_batch_invariant(kernels_of(name, batch_invariant=True), added)


@pytest.mark.parametrize("name", NAMES)
def test_operands_that_do_not_fit_are_refused(name: str) -> None:
    routing, rows = routed(2, 4, "spread", Random(1)), [0, -1]
    case = make_case(SHAPES[0], [-1] * 6, torch.float32, seed=1)
    groups, kernels = groups_for(case, routing, rows), kernels_of(name)
    other = group_experts(groups_of(rows), lambda _: True, routing.top_k_index, 5)
    buffer = torch.zeros(1, 6, 16)
    for y, x, taken, words in [
        (buffer, case.x[:5], groups, r"experts_shrink: x is \[5, 48\]; \[6, 48\] is needed"),
        (buffer[..., :9], case.x, groups, r"experts_shrink: y is \[1, 6, 9\]; \[1, 6, 16\]"),
        (buffer.half(), case.x, groups, "experts_shrink: y is torch.float16; torch.float32"),
        (buffer, case.x, other, "experts_shrink: the groups are of 5 experts; the layer has 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            kernels.experts_shrink(y, x, case.slices, taken)
    for ys, x, words in [
        ((case.y[:, 1:],), buffer, r"experts_expand: y is \[6, 79\]; \[6, 80\] is needed"),
        ((case.y, case.y), buffer, "experts_expand: 2 outputs; the layer has 1 slices"),
        ((case.y,), buffer.double(), "experts_expand: x is torch.float64; torch.float32"),
        ((case.y,), buffer[:, :5], r"experts_expand: x is \[1, 5, 16\]; \[1, 6, 16\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            kernels.experts_expand(ys, x, case.slices, groups)
