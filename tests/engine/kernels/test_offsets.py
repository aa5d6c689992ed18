"""Weights and rows more than 2**31 elements after the start of their memory.

The memory is a sparse file, which uses disk space only for accessed pages.
"""

from pathlib import Path

import pytest
import torch

from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.kernels.expert_groups import group_experts
from loradock.engine.kernels.operands import LoRASlices
from loradock.engine.layout import ModuleKind
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    NAMES,
    Case,
    Shape,
    error_of,
    expected_output,
    kernels_of,
    make_case,
)

FAR = 2**31 + 1024
"""In elements; a multiple of an arena's alignment."""
DTYPE = torch.float16
ROWS = [1, -1, 0, 1]


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    path: Path = tmp_path_factory.mktemp("sparse") / "memory"
    return torch.from_file(str(path), shared=True, size=FAR + (1 << 16), dtype=DTYPE)


def far_away(case: Case, memory: torch.Tensor) -> Case:
    """Return the same case with weights after the first 2**31 elements of `memory`."""
    layer = case.slices
    near = layer.directory
    memory[FAR : FAR + len(near.data)] = near.data
    far = SlotDirectory(memory, *near.offsets.shape)
    far.offsets.copy_(torch.where(near.offsets < 0, near.offsets, near.offsets + FAR))
    far.ranks.copy_(near.ranks)
    slices = LoRASlices(
        *(far, layer.columns, layer.in_features, layer.out_features, layer.kind, layer.experts)
    )
    return case._replace(slices=slices)


def spread(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """Return a copy whose last row starts after 2**31 elements."""
    view = memory[first:].as_strided(tensor.shape, (FAR // (len(tensor) - 1) + 64, 1))
    assert view.stride(0) * (len(tensor) - 1) > 2**31
    return view.copy_(tensor)


@pytest.mark.parametrize("name", NAMES)
def test_weights_far_into_the_arena(name: str, memory: torch.Tensor) -> None:
    kernels = kernels_of(name)
    for kind in (ModuleKind.LINEAR, ModuleKind.EMBEDDING):
        widths = (24, 40) if kind is ModuleKind.LINEAR else (24,)
        case = far_away(make_case(Shape(56, widths, 2, (5, 16), 0.0, kind), ROWS, DTYPE, 3), memory)
        found = case.y.clone()
        operands = found, case.x, case.slices, case.groups
        if kind is ModuleKind.LINEAR:
            kernels.linear(*operands)
        else:
            kernels.embedding(*operands, 1.0)
        assert error_of(found, expected_output(case)) <= ERRORS_MAX[DTYPE]


@pytest.mark.parametrize("name", NAMES)
def test_rows_far_apart(name: str, memory: torch.Tensor) -> None:
    case = make_case(Shape(56, (24, 40), 2, (5, 16), 0.0), ROWS, DTYPE, 4)
    x, y = spread(case.x, memory, 0), spread(case.y, memory, 128)
    kernels, groups = kernels_of(name), case.groups
    kernels.linear(y, x, case.slices, groups)
    assert error_of(y, expected_output(case)) <= ERRORS_MAX[DTYPE]
    y.copy_(case.y)
    shrunk = torch.zeros(2, len(ROWS), 16)
    kernels.shrink(shrunk, x, case.slices, groups)
    kernels.expand(y, shrunk, case.slices, groups)
    assert error_of(y, expected_output(case)) <= ERRORS_MAX[DTYPE]


@pytest.mark.parametrize("name", NAMES)
def test_experts_far_into_the_arena(name: str, memory: torch.Tensor) -> None:
    shape = Shape(56, (24, 40), 2, (5, 16), 0.0, ModuleKind.EXPERTS, 3)
    case = far_away(make_case(shape, ROWS, DTYPE, 5), memory)
    top_k_index = torch.tensor([[2], [0], [1], [0]])
    groups = group_experts(case.groups, lambda _: True, top_k_index, shape.experts)
    assert groups is not None
    expected = case.y.double()
    for row, slot in enumerate(ROWS):
        first, expert = 0, int(top_k_index[row, 0])
        for index, width in enumerate(shape.widths):
            if slot >= 0:
                a, b = (matrix[expert].double() for matrix in case.weights[slot, index])
                expected[row, first : first + width] += b @ (a @ case.x[row].double())
            first += width
    x, y = spread(case.x, memory, 0), spread(case.y, memory, 128)
    kernels_of(name).experts(y.split(shape.widths, dim=1), x, case.slices, groups)
    assert error_of(y, expected) <= ERRORS_MAX[DTYPE]
