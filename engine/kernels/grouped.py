"""One product for rows sorted by group: each group's rows by the group's own matrix.

What it is: PyTorch's grouped product where it takes the operands, a loop over the groups that have
rows where it does not. What it is not: a LoRA operation; experts, of the base model and of
adapters, are computed with it. One rule: both ways compute the same rows and leave out the same.
"""

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
    if _is_grouped(x, matrices):
        return torch.nn.functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends)
    y = x.new_empty(len(x), matrices.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], matrices[group].T, out=y[start:end])
        start = end
    return y


def _is_grouped(x: Tensor, matrices: Tensor) -> bool:
    strides = (max(x.stride()), matrices.stride(0), max(matrices.stride()[1:]))
    return x.dtype in _GROUPED_DTYPES and all(
        stride * x.itemsize % _STRIDE_BYTES == 0 for stride in strides
    )
