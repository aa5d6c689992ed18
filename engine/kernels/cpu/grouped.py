"""Strategy: two products for each group of rows that share an adapter.

What it is: a plan of a layer and a block, made once, run at every forward. What it is not: a
choice. One rule: rows that lie side by side and have the computation's dtype are read and written
in place; all others pass through scratch of one block.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpu.gather import Inlet, add_rows
from engine.kernels.cpu.layer_block import LayerBlock, SliceWeights
from engine.kernels.cpu.scratch import Scratch


class _Step(NamedTuple):
    """One part of one slice: its place in the block, A and B, and where the first product goes."""

    place: int
    a: Tensor
    b: Tensor
    shrunk: Tensor


class _Slice(NamedTuple):
    """One slice: its columns, its steps, and what is zero because no step writes it."""

    columns: slice
    steps: list[_Step]
    delta: Tensor
    parts: tuple[Tensor, ...]
    absent: list[Tensor]


class Grouped:
    """`y += scale * x @ A.T @ B.T`, slice by slice and part by part, computed in `dtype`.

    With float32 and half weights, A and B are converted into scratch, one at a time: for few rows
    that is cheaper than a half product, and what lies between the two is not rounded.
    """

    def __init__(self, layer: LayerBlock, dtype: torch.dtype, scratch: Scratch) -> None:
        self._block = layer.block
        self._dtype = dtype
        self._scratch = scratch
        self._inlet = Inlet(layer.block, layer.in_features, dtype, scratch)
        self._converts = layer.weights != dtype
        self._in_place = layer.block.rows is None and layer.activations == dtype == layer.weights
        self._slices = [self._plan(one) for one in layer.slices]

    def _plan(self, one: SliceWeights) -> _Slice:
        block, dtype, scratch = self._block, self._dtype, self._scratch
        steps, absent = [], []
        rows = 0 if self._in_place else block.size
        delta = scratch.take("delta", (rows, one.out_features), dtype)
        parts = () if self._in_place else delta.split_with_sizes(block.sizes)
        for place, pair in enumerate(one.pairs):
            if pair is not None:
                shape = (block.parts[place].size, pair.b.shape[1])
                a, b = (pair.a, pair.b) if self._converts else (pair.a.T, pair.b.T)
                steps.append(_Step(place, a, b, scratch.take("shrunk", shape, dtype)))
            elif not self._in_place:
                absent.append(parts[place])
        return _Slice(one.columns, steps, delta, parts, absent)

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the block's deltas to y: [tokens, width]; x: [tokens, in_features]."""
        rows = self._inlet.load_parts(x)
        for one in self._slices:
            if self._in_place:
                self._add_in_place(y, rows, one, scale)
            else:
                self._add_staged(y, rows, one, scale)

    def _add_in_place(self, y: Tensor, rows: tuple[Tensor, ...], one: _Slice, scale: float) -> None:
        block = self._block
        columns = y[block.first : block.first + block.size, one.columns]
        targets = columns.split_with_sizes(block.sizes)
        for place, a, b, shrunk in one.steps:
            torch.mm(rows[place], a, out=shrunk)
            targets[place].addmm_(shrunk, b, alpha=scale)

    def _add_staged(self, y: Tensor, rows: tuple[Tensor, ...], one: _Slice, scale: float) -> None:
        for part in one.absent:
            part.zero_()
        for place, a, b, shrunk in one.steps:
            torch.mm(rows[place], self._transposed("a", a) if self._converts else a, out=shrunk)
            if scale != 1.0:
                shrunk.mul_(scale)
            transposed = self._transposed("b", b) if self._converts else b
            torch.mm(shrunk, transposed, out=one.parts[place])
        add_rows(y[:, one.columns], one.delta, self._block)

    def _transposed(self, use: str, matrix: Tensor) -> Tensor:
        """The transpose in the computation's dtype, until the next one of the same use."""
        return self._scratch.take(use, tuple(matrix.shape), self._dtype).copy_(matrix).T
