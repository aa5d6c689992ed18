"""A block's rows on their way into scratch and back.

What it is: loads, with a conversion where the computation has another dtype, and the addition of
deltas. What it is not: a product. One rule: a row of the base model is neither read nor written.
"""

import torch
from torch import Tensor

from engine.kernels.cpu.blocks import Block
from engine.kernels.cpu.scratch import Scratch


class Inlet:
    """Where a block's rows of `x` are found: in `x` itself, or in scratch of dtype `dtype`."""

    def __init__(self, block: Block, width: int, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = block
        self._sizes = block.sizes
        self._end = block.first + block.size
        self._dtype = dtype
        self._staged = scratch.take("x", (block.size, width), dtype)
        self._parts = self._staged.split_with_sizes(self._sizes)

    def load(self, x: Tensor) -> Tensor:
        """The block's rows of x: [tokens, width], in one tensor."""
        block = self._block
        if block.rows is None:
            rows = x[block.first : self._end]
            return rows if x.dtype == self._dtype else self._staged.copy_(rows)
        if x.dtype == self._dtype:
            return torch.index_select(x, 0, block.rows, out=self._staged)
        return self._staged.copy_(torch.index_select(x, 0, block.rows))

    def load_parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same, part by part."""
        rows = self.load(x)
        return self._parts if rows is self._staged else rows.split_with_sizes(self._sizes)


def add_rows(y: Tensor, delta: Tensor, block: Block) -> None:
    """`y[rows of the block] += delta`; y: [tokens, width], delta: [block's size, width]."""
    if block.keep is not None:
        delta = torch.index_select(delta, 0, block.keep)
    if delta.dtype != y.dtype:
        delta = delta.to(y.dtype)
    if block.rows is None:
        y[block.first : block.first + block.size] += delta
    else:
        y.index_add_(0, block.rows if block.targets is None else block.targets, delta)
