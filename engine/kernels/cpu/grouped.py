"""Strategy: two products for each group of rows that share an adapter.

Contiguous rows in the computation's dtype are read and written in place; all others are copied to
scratch memory of one block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.gather import RowGatherer, add_rows
from loradock.engine.kernels.cpu.layer_block import LayerBlock, SliceWeights
from loradock.engine.kernels.cpu.scratch import Scratch


class _PartProduct(NamedTuple):
    """The products of one part of one slice: the part's index, A and B, and the first result."""

    part: int
    a: Tensor
    b: Tensor
    shrunk: Tensor


class _SlicePlan(NamedTuple):
    """One slice: its columns and products; `absent` are the parts of `delta` without weights."""

    columns: slice
    products: list[_PartProduct]
    delta: Tensor
    parts: tuple[Tensor, ...]
    absent: list[Tensor]


class Grouped:
    """`y += scale * x @ A.T @ B.T`, by slice and part, computed in `dtype`.

    With float32 and half-precision weights, A and B are converted into scratch memory one at a
    time: for few rows that is cheaper than a half-precision product, and the intermediate is not
    rounded.
    """

    def __init__(self, layer: LayerBlock, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = layer.block
        self._dtype = dtype
        self._scratch = scratch
        self._gatherer = RowGatherer(layer.block, layer.in_features, dtype, scratch)
        self._converts = layer.weight_dtype != dtype
        self._in_place = self.adds_in_place(layer, dtype)
        self._slices = [self._plan(weights) for weights in layer.slices]

    @staticmethod
    def adds_in_place(layer: LayerBlock, dtype: torch.dtype) -> bool:
        """Whether deltas are added to `y` where they are computed."""
        return layer.is_in_place(dtype)

    @staticmethod
    def copied_bytes(layer: LayerBlock, dtype: torch.dtype) -> int:
        """Return the bytes of the converted weights: of the largest A and B of an adapter."""
        if layer.weight_dtype == dtype:
            return 0
        largest = [
            max(max(weights.ranks) * weights.features[of] for weights in layer.slices)
            for of in (0, 1)
        ]
        return dtype.itemsize * sum(largest)

    def _plan(self, weights: SliceWeights) -> _SlicePlan:
        block, dtype, scratch = self._block, self._dtype, self._scratch
        products, absent = [], []
        rows = 0 if self._in_place else block.size
        delta = scratch.take("delta", (rows, weights.out_features), dtype)
        parts = () if self._in_place else delta.split_with_sizes(block.sizes)
        for index, pair in enumerate(weights.pairs):
            if pair is not None:
                shape = (block.parts[index].size, pair.b.shape[1])
                a, b = (pair.a, pair.b) if self._converts else (pair.a.T, pair.b.T)
                products.append(_PartProduct(index, a, b, scratch.take("shrunk", shape, dtype)))
            elif not self._in_place:
                absent.append(parts[index])
        return _SlicePlan(weights.columns, products, delta, parts, absent)

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the block's deltas to y: [tokens, out_features]; x: [tokens, in_features]."""
        rows = self._gatherer.load_parts(x)
        for plan in self._slices:
            if self._in_place:
                self._add_in_place(y, rows, plan, scale)
            else:
                self._add_staged(y, rows, plan, scale)

    def _add_in_place(
        self, y: Tensor, rows: tuple[Tensor, ...], plan: _SlicePlan, scale: float
    ) -> None:
        block = self._block
        columns = y[block.first : block.first + block.size, plan.columns]
        targets = columns.split_with_sizes(block.sizes)
        for index, a, b, shrunk in plan.products:
            torch.mm(rows[index], a, out=shrunk)
            targets[index].addmm_(shrunk, b, alpha=scale)

    def _add_staged(
        self, y: Tensor, rows: tuple[Tensor, ...], plan: _SlicePlan, scale: float
    ) -> None:
        for part in plan.absent:
            part.zero_()
        for index, a, b, shrunk in plan.products:
            torch.mm(rows[index], self._converted("a", a), out=shrunk)
            if scale != 1.0:
                shrunk.mul_(scale)
            torch.mm(shrunk, self._converted("b", b), out=plan.parts[index])
        add_rows(y[:, plan.columns], plan.delta, self._block)

    def _converted(self, use: str, matrix: Tensor) -> Tensor:
        """Return the transposed operand, valid until the next conversion of the same use."""
        return self._scratch.transposed(use, matrix, self._dtype) if self._converts else matrix
