"""Strategy: two products for each part of a block and slice, for long groups and for few groups."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.blocks import Block
from loradock.engine.kernels.cpu.dtypes import computes_transposed
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import LoRAPair, LoRASlices


class _Product(NamedTuple):
    """The products of one part of one slice.

    a, b: transposed, and converted by each run if their dtype is another. shrunk: the first result,
    [rows, rank]. transposed: `shrunk` transposed, if the first product is computed so.
    """

    part: int
    a: Tensor
    b: Tensor
    shrunk: Tensor
    transposed: Tensor | None


class _SliceProducts(NamedTuple):
    """One slice: its columns of the output and its products.

    delta: [rows, columns], as `parts`; empty if deltas are added in place. absent: the parts
    without weights.
    """

    columns: slice
    products: list[_Product]
    delta: Tensor
    parts: tuple[Tensor, ...]
    absent: list[Tensor]


class Looped:
    """`y += x @ A.T @ B.T`, by slice and part, computed in `dtype`.

    Rows that are contiguous, in the dtype of the computation, are read and written where they are.
    Half-precision weights that are multiplied in float32 are converted one at a time into scratch
    memory, and the intermediate result is not rounded.
    """

    def __init__(
        self,
        block: Block,
        slices: LoRASlices,
        activation_dtype: torch.dtype,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        weight_dtype = slices.directory.data.dtype
        self._block, self._dtype, self._scratch = block, dtype, scratch
        self._converts = weight_dtype != dtype
        self._in_place = block.rows is None and activation_dtype == dtype == weight_dtype
        self._slices = list(self._slice_products(slices))

    def _slice_products(self, slices: LoRASlices) -> Iterator[_SliceProducts]:
        block, take = self._block, self._scratch.take
        all_pairs = [slices.pairs(part.slot) for part in block.parts]
        ends = accumulate(slices.out_features)
        for width, end, pairs in zip(
            slices.out_features, ends, zip(*all_pairs, strict=True), strict=True
        ):
            if not any(pairs):
                continue
            delta = take("delta", (0 if self._in_place else block.size, width), self._dtype)
            parts = () if self._in_place else delta.split_with_sizes(block.sizes)
            products = [
                self._product(index, pair) for index, pair in enumerate(pairs) if pair is not None
            ]
            absent = [part for part, pair in zip(parts, pairs, strict=False) if pair is None]
            yield _SliceProducts(slice(end - width, end), products, delta, parts, absent)

    def _product(self, index: int, pair: LoRAPair) -> _Product:
        rows, rank = self._block.sizes[index], pair.b.shape[1]
        transposed = None
        if computes_transposed(self._dtype, rank, rows):
            transposed = self._scratch.take("shrunk", (rank, rows), self._dtype)
            shrunk = transposed.T
        else:
            shrunk = self._scratch.take("shrunk", (rows, rank), self._dtype)
        return _Product(index, pair.a.T, pair.b.T, shrunk, transposed)

    def run(self, y: Tensor, x: Tensor) -> None:
        """Add the block's deltas to y: [tokens, out_features]; x: [tokens, in_features]."""
        if not self._in_place:
            self._run_staged(y, x)
            return
        block = self._block
        end = block.first + block.size
        rows = x[block.first : end].split_with_sizes(block.sizes)
        for columns, products, *_ in self._slices:
            targets = y[block.first : end, columns].split_with_sizes(block.sizes)
            for part, a, b, shrunk, transposed in products:
                if transposed is None:
                    torch.mm(rows[part], a, out=shrunk)
                else:
                    torch.mm(a.T, rows[part].T, out=transposed)
                targets[part].addmm_(shrunk, b)

    def _run_staged(self, y: Tensor, x: Tensor) -> None:
        block = self._block
        rows = block.read(x, self._dtype, self._scratch).split_with_sizes(block.sizes)
        for columns, products, delta, parts, absent in self._slices:
            for part_delta in absent:
                part_delta.zero_()
            for part, a, b, shrunk, transposed in products:
                # A conversion is valid until the next of the same use.
                a_part = self._scratch.copy_of("a", a.T, self._dtype).T if self._converts else a
                if transposed is None:
                    torch.mm(rows[part], a_part, out=shrunk)
                else:
                    torch.mm(a_part.T, rows[part].T, out=transposed)
                b_part = self._scratch.copy_of("b", b.T, self._dtype).T if self._converts else b
                torch.mm(shrunk, b_part, out=parts[part])
            block.add(y[:, columns], delta)
