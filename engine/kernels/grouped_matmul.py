"""One product for rows sorted by group: each group's rows by the group's own matrix.

What it is: PyTorch's grouped product where it takes the operands and most groups have rows, else a
loop over the groups that have some. What it is not: a LoRA operation; the base model's experts are
computed with it. One rule: both ways compute the same rows and leave out the same.
"""

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

_GROUPED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES: Final = 16
"""PyTorch's product wants rows that start on a multiple of this."""


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """`x[t] @ matrices[g(t)].T` in x's dtype, [rows, out].

    x: [rows, in], rows of group 0 first. matrices: [groups, out, in], of the same dtype, rows or
    columns contiguous. ends: [groups] int32, where each group's rows end. Rows behind the last end
    are not computed: their contents mean nothing.
    """
    turned, is_grouped = matrices.transpose(1, 2), _is_grouped(x, matrices)
    if is_grouped and x.device.type != "cpu":
        return torch.nn.functional.grouped_mm(x, turned, offs=ends)
    bounds = ends.tolist()
    sizes = [end - start for start, end in pairwise((0, *bounds))]
    active = [group for group, size in enumerate(sizes) if size]
    # On a CPU a group without rows costs PyTorch's product nearly as much as one with a row.
    if is_grouped and 2 * len(active) > len(sizes):
        return torch.nn.functional.grouped_mm(x, turned, offs=ends)
    y = x.new_empty(len(x), matrices.shape[1])
    rest = [len(x) - sum(sizes)]
    parts = (torch.split(tensor, [*(sizes[group] for group in active), *rest]) for tensor in (x, y))
    for group, rows, result in zip(active, *parts, strict=False):
        torch.mm(rows, turned[group], out=result)
    return y


def _is_grouped(x: Tensor, matrices: Tensor) -> bool:
    strides = (max(x.stride()), matrices.stride(0), max(matrices.stride()[1:]))
    return x.dtype in _GROUPED_DTYPES and all(
        stride * x.itemsize % _STRIDE_BYTES == 0 for stride in strides
    )
