"""Batches for the operations on experts, and the expected result as an explicit sum over pairs.

Row `p` of an operand is the pair `p`, unless a test changes that.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels import Kernels
from loradock.engine.kernels.expert_groups import ExpertGroups, group_experts
from loradock.engine.layout import ModuleKind
from tests.support.kernels.kernel_cases import (
    IS_INTERPRETED,
    REPEATS,
    Case,
    Shape,
    groups_of,
    make_case,
    mixed_rows,
)

TOP_K = 3


class Routing(NamedTuple):
    """The number of experts, and the experts of each row."""

    experts: int
    top_k_index: Tensor


def routed(tokens: int, experts: int, how: str, random: Random) -> Routing:
    """Return a routing `how`: `spread` or `one` expert of this rank, `elsewhere` any rank's."""
    choices = {"spread": range(experts), "one": [experts - 1], "elsewhere": range(experts + 1)}
    picked = choices[how]
    # With one choice a row uses the same expert several times, which kernels must support although
    # routers don't do it.
    rows = [
        random.sample(picked, TOP_K) if len(picked) >= TOP_K else random.choices(picked, k=TOP_K)
        for _ in range(tokens)
    ]
    return Routing(experts, torch.tensor(rows, dtype=torch.int64).view(tokens, TOP_K))


def has_weights(case: Case, slot: int) -> bool:
    return any((slot, index) in case.weights for index in range(len(case.slices.columns)))


def groups_for(case: Case, routing: Routing, rows: list[int]) -> ExpertGroups | None:
    return group_experts(
        groups_of(rows), lambda slot: has_weights(case, slot), routing.top_k_index, routing.experts
    )


def expected(case: Case, routing: Routing, rows: list[int], y: Tensor, x: Tensor) -> Tensor:
    """Return `y`, whose row `p` is the pair `p`, with every pair's delta, in float64."""
    result = y.double().clone()
    for pair, expert in enumerate(routing.top_k_index.flatten().tolist()):
        first, slot = 0, rows[pair // TOP_K]
        for index, width in enumerate(case.slices.out_features):
            if (slot, index) in case.weights and expert < routing.experts:
                a, b = (matrix[expert].double() for matrix in case.weights[slot, index])
                result[pair, first : first + width] += b @ (a @ x[pair].double())
            first += width
    return result


SHAPES = (
    Shape(48, (80,), 1, (16,), 0.0, ModuleKind.EXPERTS, 4),
    Shape(33, (7, 9), 3, (1, 3, 8), 0.2, ModuleKind.EXPERTS, 5),
    Shape(64, (24, 24), 9, (8,), 0.3, ModuleKind.EXPERTS, 16),
    Shape(72, (40,), 2, (13, 40), 0.0, ModuleKind.EXPERTS, 3),
)
"""Odd ranks, ranks above a block, absent columns, and more slots and experts than pairs."""

TOKENS = (0, 1, 7) if IS_INTERPRETED else (0, 1, 7, 64)


AddDeltas = Callable[[Kernels, Case, Routing, list[int]], Tensor]
"""Returns the case's output with the deltas of these rows' adapters added."""


def assert_batch_invariant(kernels: Kernels, added: AddDeltas) -> None:
    """Assert that a pair has the same bits in every batch."""
    random = Random(12)
    rows, routing = mixed_rows(random, 24, 2), routed(24, 3, "spread", random)
    case = make_case(SHAPES[3]._replace(ranks=(13,)), [-1] * 72, torch.float32, seed=12)
    whole = added(kernels, case, routing, rows)
    for _ in range(REPEATS):
        some = random.sample([row for row in range(24) if rows[row] >= 0], random.choice((1, 9)))
        pairs = [TOP_K * row + k for row in some for k in range(TOP_K)]
        part = case._replace(x=case.x[pairs], y=case.y[pairs])
        routing_part = Routing(3, routing.top_k_index[some])
        found = added(kernels, part, routing_part, [rows[row] for row in some])
        assert torch.equal(found, whole[pairs])
