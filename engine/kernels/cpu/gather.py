"""Gathering of a block's rows into scratch memory, and the addition of deltas to them.

Rows of the base model are neither read nor written.
"""

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.blocks import Block
from loradock.engine.kernels.cpu.scratch import Scratch


class RowGatherer:
    """A block's rows of `x` in `dtype`: a view of `x` if possible, else a scratch copy."""

    def __init__(self, block: Block, width: int, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = block
        self._sizes = block.sizes
        self._end = block.first + block.size
        self._dtype = dtype
        self._staged = scratch.take("x", (block.size, width), dtype)
        self._parts = self._staged.split_with_sizes(self._sizes)

    def load(self, x: Tensor) -> Tensor:
        """Return the block's rows of x [tokens, in_features] in one tensor."""
        block = self._block
        if block.rows is None:
            rows = x[block.first : self._end]
            return rows if x.dtype == self._dtype else self._staged.copy_(rows)
        if x.dtype == self._dtype:
            return torch.index_select(x, 0, block.rows, out=self._staged)
        return self._staged.copy_(torch.index_select(x, 0, block.rows))

    def load_parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the same rows, one tensor per part."""
        rows = self.load(x)
        return self._parts if rows is self._staged else rows.split_with_sizes(self._sizes)


def add_rows(y: Tensor, delta: Tensor, block: Block) -> None:
    """Compute `y[block's rows] += delta`; y: [tokens, columns], delta: [block rows, columns]."""
    if block.real_indices is not None:
        delta = torch.index_select(delta, 0, block.real_indices)
    if delta.dtype != y.dtype:
        delta = delta.to(y.dtype)
    if block.rows is None:
        y[block.first : block.first + block.size] += delta
    else:
        y.index_add_(0, block.rows if block.real_rows is None else block.real_rows, delta)
