"""Strategy: the weights of all of a block's parts stacked, and one batched product per slice.

It needs one rank in all parts of a slice. Weights are copied once per group, and copies are not
cached.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpu.blocks import equal_parts
from engine.kernels.cpu.gather import RowGatherer, add_rows
from engine.kernels.cpu.layer_block import LayerBlock, SliceWeights, computes_transposed
from engine.kernels.cpu.scratch import Scratch


class _SlicePlan(NamedTuple):
    """One slice: A [parts, rank, in], B [parts, out, rank]; results [parts, rows, ...].

    transposed: `shrunk` with its last two dimensions swapped, where the product is computed so.
    """

    columns: slice
    sources: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    a: Tensor
    b: Tensor
    shrunk: Tensor
    transposed: Tensor | None
    delta: Tensor


class Gathered:
    """`y += scale * bmm(bmm(x, A.T), B.T)`, parts padded to equal sizes, computed in `dtype`."""

    def __init__(self, layer: LayerBlock, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = equal_parts(layer.block)
        self._shape = (len(self._block.parts), self._block.parts[0].size)
        self._dtype = dtype
        self._scratch = scratch
        self._gatherer = RowGatherer(self._block, layer.in_features, dtype, scratch)
        self._slices = [self._plan(weights) for weights in layer.slices]

    @staticmethod
    def can_run(layer: LayerBlock) -> bool:
        """Whether every slice has the same rank in all parts."""
        return all(len(set(weights.ranks)) == 1 for weights in layer.slices)

    def _plan(self, weights: SliceWeights) -> _SlicePlan:
        take, dtype = self._scratch.take, self._dtype
        (parts, rows), rank = self._shape, weights.ranks[0]
        present = [pair for pair in weights.pairs if pair is not None]
        transposes = computes_transposed(dtype, rank, rows)
        shrunk = take("shrunk", (parts, rank, rows) if transposes else (parts, rows, rank), dtype)
        return _SlicePlan(
            weights.columns,
            (tuple(pair.a for pair in present), tuple(pair.b for pair in present)),
            take("a", (parts, rank, weights.in_features), dtype),
            take("b", (parts, weights.out_features, rank), dtype),
            shrunk.mT if transposes else shrunk,
            shrunk if transposes else None,
            take("delta", (*self._shape, weights.out_features), dtype),
        )

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the block's deltas to y: [tokens, out_features]; x: [tokens, in_features]."""
        rows = self._gatherer.load(x)
        for plan in self._slices:
            torch.stack(plan.sources[0], out=plan.a)
            if plan.transposed is None:
                torch.bmm(rows.view(*self._shape, -1), plan.a.mT, out=plan.shrunk)
            else:
                torch.bmm(plan.a, rows.view(*self._shape, -1).mT, out=plan.transposed)
            torch.stack(plan.sources[1], out=plan.b)
            target = y[:, plan.columns]
            if self._is_in_place(target):
                rows_of_y = target[self._block.first : self._block.first + self._block.size]
                rows_of_y.view(*self._shape, -1).baddbmm_(plan.shrunk, plan.b.mT, alpha=scale)
                continue
            if scale != 1.0:
                plan.shrunk.mul_(scale)
            torch.bmm(plan.shrunk, plan.b.mT, out=plan.delta)
            add_rows(target, plan.delta.flatten(0, 1), self._block)

    def _is_in_place(self, target: Tensor) -> bool:
        """Whether the second product can be added directly to y, which saves a pass over it."""
        is_whole = self._block.rows is None and self._block.real_indices is None
        return is_whole and target.is_contiguous() and target.dtype == self._dtype
