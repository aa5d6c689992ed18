"""The grouped matrix product, compared with one product per group."""

import pytest
import torch

from loradock.engine.kernels.grouped_matmul import grouped_matmul
from tests.support.kernels.kernel_cases import ERRORS_MAX, error_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(16, 8), (5, 16), (16, 3), (1, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_grouped_matmul_uses_each_groups_matrix(
    dtype: torch.dtype, inner: int, outer: int, is_transposed: bool
) -> None:
    torch.manual_seed(inner)
    matrices = torch.randn(4, outer, inner).to(dtype)
    if is_transposed:
        matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    x = torch.randn(9, inner).to(dtype)
    x[7:] = torch.nan
    found = grouped_matmul(x, matrices, torch.tensor([3, 3, 4, 7], dtype=torch.int32))
    parts = [(0, 0, 3), (2, 3, 4), (3, 4, 7)]
    wanted = torch.cat([x[a:b].double() @ matrices[g].double().T for g, a, b in parts])
    assert error_of(found[:7], wanted) < ERRORS_MAX[dtype]
