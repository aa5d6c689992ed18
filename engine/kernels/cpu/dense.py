"""Strategy: one product over all of a block's adapters at once, masked in between.

What it is: a plan of a layer and a block, made once, run at every forward. What it is not: a
choice. One rule: weights are put side by side for each run and not kept, so that no memory is
taken that nobody has counted.

A row's products with the others' A are computed and then set to zero; that pays where calls cost
more than numbers: many adapters with few rows each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpu.gather import Inlet, add_rows
from engine.kernels.cpu.layer_block import LayerBlock, SliceWeights
from engine.kernels.cpu.scratch import Scratch


class _Slice(NamedTuple):
    """One slice: all A `[ranks, in]`, all B `[out, ranks]`; others: `[rows, ranks]` bool."""

    columns: slice
    sources: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    a: Tensor
    b: Tensor
    others: Tensor
    shrunk: Tensor
    delta: Tensor


class Dense:
    """`y += scale * ((x @ all A.T) masked) @ all B.T`, computed in `dtype`."""

    def __init__(self, layer: LayerBlock, dtype: torch.dtype, scratch: Scratch) -> None:
        self._layer = layer
        self._dtype = dtype
        self._scratch = scratch
        self._inlet = Inlet(layer.block, layer.in_features, dtype, scratch)
        self._slices = [self._plan(one) for one in layer.slices]

    def _plan(self, one: SliceWeights) -> _Slice:
        take, dtype, rows = self._scratch.take, self._dtype, self._layer.block.size
        ranks = sum(one.ranks)
        present = [pair for pair in one.pairs if pair is not None]
        return _Slice(
            one.columns,
            (tuple(pair.a for pair in present), tuple(pair.b for pair in present)),
            take("a", (ranks, one.in_features), dtype),
            take("b", (one.out_features, ranks), dtype),
            _others(self._layer.block.sizes, one.ranks),
            take("shrunk", (rows, ranks), dtype),
            take("delta", (rows, one.out_features), dtype),
        )

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the block's deltas to y: [tokens, width]; x: [tokens, in_features]."""
        rows = self._inlet.load(x)
        for one in self._slices:
            torch.cat(one.sources[0], 0, out=one.a)
            torch.mm(rows, one.a.T, out=one.shrunk).masked_fill_(one.others, 0.0)
            if scale != 1.0:
                one.shrunk.mul_(scale)
            torch.cat(one.sources[1], 1, out=one.b)
            torch.mm(one.shrunk, one.b.T, out=one.delta)
            add_rows(y[:, one.columns], one.delta, self._layer.block)


def _others(counts: list[int], ranks: list[int]) -> Tensor:
    """[rows, ranks] bool: whether a column of the first product belongs to another part."""
    parts = torch.arange(len(counts))
    of_row = parts.repeat_interleave(torch.tensor(counts))
    of_column = parts.repeat_interleave(torch.tensor(ranks))
    return of_row[:, None] != of_column
