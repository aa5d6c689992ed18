"""The weights that a launch reads, counted by address in Triton's interpreter.

It needs TRITON_INTERPRET, which `test_triton.py` sets for a separate process.
"""

import numpy as np
import pytest
import torch
from triton._C.libtriton import interpreter

from loradock.engine.kernels.expert_groups import group_experts
from loradock.engine.layout import ModuleKind
from tests.support.kernels.kernel_cases import IS_INTERPRETED, Shape, kernels_of, make_case

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Record the addresses of all elements that kernels load, per load."""
    seen: list[np.ndarray] = []
    original = interpreter.load

    def load(addresses, mask, *rest):
        seen.append(np.asarray(addresses)[np.asarray(mask)])
        return original(addresses, mask, *rest)

    monkeypatch.setattr(interpreter, "load", load)
    return seen


def weight_elements_read(loads: list[np.ndarray], case, add, *scale: float) -> int:
    """Return the number of arena elements that one call loads, counting repeated loads."""
    data = case.slices.directory.data
    loads.clear()
    add(case.y.clone(), case.x, case.slices, case.groups, *scale)
    addresses = np.concatenate(loads)
    end = data.data_ptr() + data.numel() * data.element_size()
    return int(((addresses >= data.data_ptr()) & (addresses < end)).sum())


def elements(case) -> int:
    active = set(case.rows) - {-1}
    return sum(
        a.numel() + b.numel() for (slot, _), (a, b) in case.weights.items() if slot in active
    )


@pytest.mark.parametrize("ranks", [(1,), (8,), (13,), (1, 8, 40)])
def test_a_batch_reads_each_weight_of_its_adapters_once_at_their_own_rank(loads, ranks) -> None:
    case = make_case(Shape(72, (24, 40), 6, ranks, 0.2), [0, 5, -1, 3, 3, 0], torch.float16, seed=3)
    assert weight_elements_read(loads, case, kernels_of("triton").linear) == elements(case)


def test_rank_8_costs_the_same_next_to_slots_of_rank_256(loads) -> None:
    shape = Shape(64, (48,), 3, (8,), 0.0)
    small = make_case(shape, [0, 0, 1, 1, -1], torch.float16, seed=4)
    large = make_case(shape._replace(slots=4), [0, 0, 1, 1, -1], torch.float16, seed=4)
    directory = large.slices.directory
    # No row uses this slot; a kernel that pads would read every slot at its rank.
    directory.ranks[3, 1] = 256
    directory.version += 1
    add = kernels_of("triton").linear
    assert weight_elements_read(loads, small, add) == weight_elements_read(loads, large, add)
    assert weight_elements_read(loads, small, add) == 2 * 8 * (64 + 48)


def test_an_embedding_reads_the_rows_of_its_tokens(loads) -> None:
    shape = Shape(301, (40,), 2, (8,), 0.0, ModuleKind.EMBEDDING)
    case = make_case(shape, [0, 1, 1, -1, 0], torch.float16, seed=5)
    read = weight_elements_read(loads, case, kernels_of("triton").embedding, 1.0)
    assert read == 4 * 8 + 2 * 40 * 8


def test_experts_without_pairs_are_not_read(loads) -> None:
    shape = Shape(64, (24, 40), 3, (13,), 0.0, ModuleKind.EXPERTS, 6)
    case = make_case(shape, [0, 2, -1, 0], torch.float16, seed=6)
    groups = group_experts(case.groups, lambda _: True, torch.tensor([[1], [5], [3], [1]]), 6)
    assert groups is not None

    def add(y, x, slices, *_) -> None:
        kernels_of("triton").experts(y.split(shape.widths, dim=1), x, slices, groups)

    # Slot 0's expert 1 and slot 2's expert 5, each with both slices.
    wanted = 2 * 13 * (2 * 64 + 24 + 40)
    assert weight_elements_read(loads, case, add) == wanted
