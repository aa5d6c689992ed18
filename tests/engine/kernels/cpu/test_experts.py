"""Products of experts on a CPU: both ways give every pair's delta, and which one is chosen."""

from random import Random

import pytest
import torch

from loradock.engine.kernels.cpu import experts
from loradock.engine.kernels.cpu.experts import CpuExperts
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.layout import ModuleKind
from tests.support.kernels.expert_cases import TOP_K, expected, groups_for, routed
from tests.support.kernels.kernel_cases import ERRORS_MAX, Shape, error_of, make_case, mixed_rows

MIXED = Shape(40, (24, 17), 4, (8,), 0.3, ModuleKind.EXPERTS, 6)
"""One rank; some slots have no weights in a slice."""


def added(shape: Shape, dtype: torch.dtype, tokens: int) -> list[bool]:
    """Add the deltas of random pairs; return for each slice whether weights were copied."""
    random, chosen = Random(tokens), []

    class Observed(CpuExperts):
        def _gathers(self, *operands: object) -> bool:
            chosen.append(super()._gathers(*operands))
            return chosen[-1]

    rows, routing = mixed_rows(random, tokens, shape.slots), routed(tokens, 6, "spread", random)
    case = make_case(shape, [-1] * tokens * TOP_K, dtype, seed=tokens)
    wanted = expected(case, routing, rows, case.y, case.x)
    Observed(Scratch())(
        case.y.split(shape.widths, dim=1), case.x, case.slices, groups_for(case, routing, rows)
    )
    assert error_of(case.y, wanted) < ERRORS_MAX[dtype]
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_copied_for_few_pairs_per_group_and_not_for_many(dtype: torch.dtype) -> None:
    assert added(MIXED, dtype, 9) == [True, True]
    assert added(MIXED, dtype, 600) == [False, False]


def test_weights_of_unlike_ranks_or_many_bytes_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert added(MIXED._replace(ranks=(4, 8)), torch.float32, 9) == [False, False]
    monkeypatch.setattr(experts, "_GATHERED_BYTES_MAX", 1 << 10)
    assert added(MIXED, torch.float32, 9) == [False, False]
