"""Strategy: one batched product per slice over all of a block's parts.

It needs one rank in all parts of a slice. Where the weights of consecutive parts have the same
distance in the arena, as those of adapters of one shape have, they are one tensor with a stride and
are read in place. Otherwise they are copied once per run into scratch memory, and not kept.
"""

from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.blocks import equal_parts
from loradock.engine.kernels.cpu.gather import RowGatherer, add_rows
from loradock.engine.kernels.cpu.layer_block import (
    EqualDistance,
    LayerBlock,
    SliceWeights,
    computes_transposed,
)
from loradock.engine.kernels.cpu.scratch import Scratch

FEW_ROWS_MAX: Final = 8
"""The most rows per part for which `TransposedGathered` is tried."""


class _Stack(NamedTuple):
    """The copies to make before a product: of the sources, into A and B of the product."""

    sources: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    a: Tensor
    b: Tensor

    def fill(self) -> None:
        torch.stack(self.sources[0], out=self.a)
        torch.stack(self.sources[1], out=self.b)


class _Product(NamedTuple):
    """Parts `parts` of a slice: A [parts, rank, in], B [parts, out, rank]; results likewise.

    transposed: `shrunk` with its last two dimensions swapped, where the product is computed so.
    """

    parts: slice
    a: Tensor
    b: Tensor
    shrunk: Tensor
    transposed: Tensor | None
    delta: Tensor


class _SlicePlan(NamedTuple):
    """One slice: its columns of the output, its products, and all their results."""

    columns: slice
    stack: _Stack | None
    products: tuple[_Product, ...]
    delta: Tensor


class Gathered:
    """`y += scale * bmm(bmm(x, A.T), B.T)`, parts padded to equal sizes, computed in `dtype`."""

    transposes: ClassVar = False
    """Whether the first product is always computed as `A @ x.T`."""

    def __init__(self, layer: LayerBlock, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = equal_parts(layer.block)
        self._shape = (len(self._block.parts), self._block.parts[0].size)
        self._dtype = dtype
        self._scratch = scratch
        self._gatherer = RowGatherer(self._block, layer.in_features, dtype, scratch)
        self._weight_dtype = layer.weight_dtype
        self._slices = [self._plan(weights) for weights in layer.slices]

    @staticmethod
    def can_run(layer: LayerBlock) -> bool:
        """Whether every slice has the same rank in all parts."""
        return all(len(set(weights.ranks)) == 1 for weights in layer.slices)

    @staticmethod
    def adds_in_place(layer: LayerBlock, dtype: torch.dtype) -> bool:
        """Whether deltas are added to `y` where they are computed."""
        is_whole = len(set(layer.block.sizes)) == len(layer.slices) == 1
        return is_whole and layer.is_in_place(dtype)

    @staticmethod
    def copied_bytes(layer: LayerBlock, dtype: torch.dtype) -> int:
        """Return the bytes of the copies of weights: those of a slice are reused by the next."""
        copied = [one for one in layer.slices if stacks(one, layer.weight_dtype, dtype)]
        return dtype.itemsize * max((weights.elements for weights in copied), default=0)

    def _plan(self, weights: SliceWeights) -> _SlicePlan:
        take, dtype = self._scratch.take, self._dtype
        (parts, rows), rank = self._shape, weights.ranks[0]
        transposes = self.transposes or computes_transposed(dtype, rank, rows)
        shrunk = take("shrunk", (parts, rank, rows) if transposes else (parts, rows, rank), dtype)
        delta = take("delta", (*self._shape, weights.out_features), dtype)
        stack = self._stack(weights) if stacks(weights, self._weight_dtype, dtype) else None
        products = []
        for run in (EqualDistance(0, parts, 0),) if stack else weights.strided_runs:
            own = slice(run.first, run.first + run.parts)
            a, b = (stack.a, stack.b) if stack else _strided(weights, run)
            products.append(
                _Product(
                    own,
                    a,
                    b,
                    shrunk[own].mT if transposes else shrunk[own],
                    shrunk[own] if transposes else None,
                    delta[own],
                )
            )
        return _SlicePlan(weights.columns, stack, tuple(products), delta)

    def _stack(self, weights: SliceWeights) -> _Stack:
        take, parts, rank = self._scratch.take, self._shape[0], weights.ranks[0]
        present = weights.present
        return _Stack(
            (tuple(pair.a for pair in present), tuple(pair.b for pair in present)),
            take("a", (parts, rank, weights.in_features), self._dtype),
            take("b", (parts, weights.out_features, rank), self._dtype),
        )

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the block's deltas to y: [tokens, out_features]; x: [tokens, in_features]."""
        rows = self._gatherer.load(x).view(*self._shape, -1)
        for plan in self._slices:
            if plan.stack is not None:
                plan.stack.fill()
            target = y[:, plan.columns]
            in_place = self._rows_in_place(target)
            for product in plan.products:
                _shrink(product, rows)
                if in_place is not None:
                    own = in_place[product.parts]
                    own.baddbmm_(product.shrunk, product.b.mT, alpha=scale)
                    continue
                if scale != 1.0:
                    product.shrunk.mul_(scale)
                torch.bmm(product.shrunk, product.b.mT, out=product.delta)
            if in_place is None:
                add_rows(target, plan.delta.flatten(0, 1), self._block)

    def _rows_in_place(self, target: Tensor) -> Tensor | None:
        """Return the rows of `y` by part where the second product can be added directly to them.

        That saves a pass over them. Elsewhere None.
        """
        block = self._block
        is_whole = block.rows is None and block.real_indices is None
        if not (is_whole and target.is_contiguous() and target.dtype == self._dtype):
            return None
        return target[block.first : block.first + block.size].view(*self._shape, -1)


class TransposedGathered(Gathered):
    """The same with a first product `bmm(A, x.T)`, whose result is read transposed by the second.

    For few rows in float32 that takes 0.75 of the time on one processor, and twice on another.
    """

    transposes = True

    @staticmethod
    def can_run(layer: LayerBlock) -> bool:
        """As the base class, for few rows of operands in float32."""
        is_float32 = layer.activation_dtype == layer.weight_dtype == torch.float32
        return is_float32 and max(layer.block.sizes) <= FEW_ROWS_MAX and Gathered.can_run(layer)


def stacks(weights: SliceWeights, weight_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the weights are copied into one tensor without gaps.

    They are if they are converted, if their parts have too many different distances, and in half
    precision: PyTorch's batched products of bfloat16 are up to 30 times as slow with gaps.
    """
    if weight_dtype != dtype or dtype not in (torch.float32, torch.float64):
        return True
    return 2 * len(weights.strided_runs) > len(weights.pairs)


def _shrink(product: _Product, rows: Tensor) -> None:
    """Compute the first product; rows: [all parts, rows, in_features]."""
    own = rows[product.parts]
    if product.transposed is None:
        torch.bmm(own, product.a.mT, out=product.shrunk)
    else:
        torch.bmm(product.a, own.mT, out=product.transposed)


def _strided(weights: SliceWeights, run: EqualDistance) -> tuple[Tensor, Tensor]:
    """Return A and B of a run's parts as views of the arena."""
    a, b = (
        matrix.as_strided((run.parts, *matrix.shape), (run.distance, *matrix.stride()))
        for matrix in weights.present[run.first]
    )
    return a, b
