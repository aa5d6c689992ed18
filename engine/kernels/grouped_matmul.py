"""A grouped matrix product: each group of rows times the group's own matrix.

PyTorch's grouped product computes it if it supports the operands and most groups have rows, and
a loop over the groups with rows otherwise. Both compute the same rows.
"""

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

_SUPPORTED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES: Final = 16
"""PyTorch's grouped product requires strides that are multiples of this."""


def grouped_matmul(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return `x[t] @ matrices[g(t)].T` in x's dtype: [rows, out].

    x: [rows, in], sorted by group. matrices: [groups, out, in], of the same dtype, rows or columns
    contiguous. ends: [groups] int32, the end of each group's rows. Rows after the last end are
    undefined.
    """
    transposed, is_supported = matrices.transpose(1, 2), _is_supported(x, matrices)
    if is_supported and x.device.type != "cpu":
        return torch.nn.functional.grouped_mm(x, transposed, offs=ends)
    bounds = ends.tolist()
    sizes = [end - start for start, end in pairwise((0, *bounds))]
    active = [group for group, size in enumerate(sizes) if size]
    # On a CPU, PyTorch's product takes nearly as long for an empty group as for one with a row.
    if is_supported and 2 * len(active) > len(sizes):
        return torch.nn.functional.grouped_mm(x, transposed, offs=ends)
    y = x.new_empty(len(x), matrices.shape[1])
    rest = [len(x) - sum(sizes)]
    parts = (torch.split(tensor, [*(sizes[group] for group in active), *rest]) for tensor in (x, y))
    for group, rows, result in zip(active, *parts, strict=False):
        torch.mm(rows, transposed[group], out=result)
    return y


def _is_supported(x: Tensor, matrices: Tensor) -> bool:
    strides = (max(x.stride()), matrices.stride(0), max(matrices.stride()[1:]))
    return x.dtype in _SUPPORTED_DTYPES and all(
        stride * x.itemsize % _STRIDE_BYTES == 0 for stride in strides
    )
