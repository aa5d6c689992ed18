"""Strategy: the weights of all of a block's parts gathered, and one batched product.

What it is: a plan of a layer and a block, made once, run at every forward. What it is not: a
choice. One rule: one copy a group and never one a row, and the copies are not kept.

Where every group has one row this is the way of a weight copy a row. Only where all parts of a
slice have one rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpu.blocks import equal_parts
from engine.kernels.cpu.gather import Inlet, add_rows
from engine.kernels.cpu.layer_block import LayerBlock, SliceWeights, is_turned
from engine.kernels.cpu.scratch import Scratch


class _Slice(NamedTuple):
    """One slice: A `[parts, rank, in]`, B `[parts, out, rank]`; results `[parts, rows, ...]`.

    turned: `shrunk` with its last two dimensions exchanged, where the product is made that way.
    """

    columns: slice
    sources: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    a: Tensor
    b: Tensor
    shrunk: Tensor
    turned: Tensor | None
    delta: Tensor


class Gathered:
    """`y += scale * bmm(bmm(x, A.T), B.T)`, parts filled up to equal size, computed in `dtype`."""

    def __init__(self, layer: LayerBlock, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = equal_parts(layer.block)
        self._shape = (len(self._block.parts), self._block.parts[0].size)
        self._dtype = dtype
        self._scratch = scratch
        self._inlet = Inlet(self._block, layer.in_features, dtype, scratch)
        self._slices = [self._plan(one) for one in layer.slices]

    @staticmethod
    def can_run(layer: LayerBlock) -> bool:
        """Whether every slice has one rank, in all parts."""
        return all(len(set(one.ranks)) == 1 for one in layer.slices)

    def _plan(self, one: SliceWeights) -> _Slice:
        take, dtype = self._scratch.take, self._dtype
        (parts, rows), rank = self._shape, one.ranks[0]
        present = [pair for pair in one.pairs if pair is not None]
        turns = is_turned(dtype, rank, rows)
        shrunk = take("shrunk", (parts, rank, rows) if turns else (parts, rows, rank), dtype)
        return _Slice(
            one.columns,
            (tuple(pair.a for pair in present), tuple(pair.b for pair in present)),
            take("a", (parts, rank, one.in_features), dtype),
            take("b", (parts, one.out_features, rank), dtype),
            shrunk.mT if turns else shrunk,
            shrunk if turns else None,
            take("delta", (*self._shape, one.out_features), dtype),
        )

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the block's deltas to y: [tokens, width]; x: [tokens, in_features]."""
        rows = self._inlet.load(x)
        for one in self._slices:
            torch.stack(one.sources[0], out=one.a)
            if one.turned is None:
                torch.bmm(rows.view(*self._shape, -1), one.a.mT, out=one.shrunk)
            else:
                torch.bmm(one.a, rows.view(*self._shape, -1).mT, out=one.turned)
            torch.stack(one.sources[1], out=one.b)
            target = y[:, one.columns]
            if self._is_in_place(target):
                own = target[self._block.first : self._block.first + self._block.size]
                own.view(*self._shape, -1).baddbmm_(one.shrunk, one.b.mT, alpha=scale)
                continue
            if scale != 1.0:
                one.shrunk.mul_(scale)
            torch.bmm(one.shrunk, one.b.mT, out=one.delta)
            add_rows(target, one.delta.flatten(0, 1), self._block)

    def _is_in_place(self, target: Tensor) -> bool:
        """Whether the second product can be added where it belongs, which saves a pass over it."""
        is_whole = self._block.rows is None and self._block.keep is None
        return is_whole and target.is_contiguous() and target.dtype == self._dtype
