"""The two products that the reference is made of.

What it is: `x @ w.T` as BLAS makes it, and as elementwise steps in a fixed order. What it is not:
fast; the second takes many times the first's time. One rule: both take rows and a matrix as it lies
in the arena, so an operation's text is the same whichever is chosen.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""x [rows, width], w [n, width] -> [rows, n]."""

_TERMS_MAX: Final = 1 << 22
"""How many products of two numbers are held at once."""


def matrix_product(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w.T`; how a row is summed may depend on how many rows there are."""
    return x @ w.T


def ordered_product(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w.T` where a row's bits depend on that row and `w` alone.

    Every step is elementwise and so rounded by itself: all products, then halves added to halves
    until one number is left.
    """
    rows_count = max(1, _TERMS_MAX // max(1, w.numel()))
    blocks = [_ordered_block(rows, w) for rows in torch.split(x, rows_count)]
    return torch.cat(blocks) if blocks else x.new_empty(0, len(w))


def _ordered_block(x: Tensor, w: Tensor) -> Tensor:
    terms = x[:, None] * w[None]
    width = terms.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        terms[..., : width - half] += terms[..., half:width]
        width = half
    return terms[..., 0]
