"""The matrix products of the references: by BLAS, or elementwise in a fixed order."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

Matmul = Callable[[Tensor, Tensor], Tensor]
"""x [rows, in], w [out, in] -> x @ w.T [rows, out]; the type of both products."""

_PRODUCTS_MAX: Final = 1 << 22
"""The most elementwise products that are stored at once."""


def blas_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Return `x @ w.T`; the order in which a row is summed may depend on the number of rows."""
    return x @ w.T


def ordered_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Return `x @ w.T` where a row's bits depend on that row and `w` alone; many times slower.

    Every step is elementwise and so rounded separately: all products, then the second half added to
    the first until one number is left.
    """
    rows_per_block = max(1, _PRODUCTS_MAX // max(1, w.numel()))
    blocks = [_ordered_block(rows, w) for rows in torch.split(x, rows_per_block)]
    return torch.cat(blocks) if blocks else x.new_empty(0, len(w))


def _ordered_block(x: Tensor, w: Tensor) -> Tensor:
    products = x[:, None] * w[None]
    width = products.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        products[..., : width - half] += products[..., half:width]
        width = half
    return products[..., 0]
