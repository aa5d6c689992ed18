"""Strategy: one batched product per slice over all of a block's parts, which have equal ranks.

If consecutive parts' weights have the same distance in the arena, as those of adapters of one shape
have, they are one tensor with a stride and are read in place. Half-precision weights are copied by
each run into scratch memory: PyTorch's batched products of bfloat16 are up to 30 times as slow with
gaps between the matrices.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.blocks import Block
from loradock.engine.kernels.cpu.dtypes import computes_transposed
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import LoRAPair, LoRASlices


class _Run(NamedTuple):
    """Parts `first` to `first + parts` of a slice, whose weights are `distance` elements apart."""

    first: int
    parts: int
    distance: int


class _Product(NamedTuple):
    """Parts `parts` of a slice: A [parts, rank, in], B [parts, out, rank]; results likewise.

    transposed: `shrunk` with its last two dimensions swapped, if the product is computed so.
    """

    parts: slice
    a: Tensor
    b: Tensor
    shrunk: Tensor
    transposed: Tensor | None
    delta: Tensor


class _SliceProducts(NamedTuple):
    """One slice: its columns of the output, its products, and all their results.

    `copied`: every part's A and B, if they are copied before the products.
    """

    columns: slice
    copied: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None
    products: tuple[_Product, ...]
    delta: Tensor


class Batched:
    """`y += bmm(bmm(x, A.T), B.T)` over parts of equal sizes, computed in `dtype`."""

    def __init__(
        self, block: Block, slices: LoRASlices, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        self._block, self._dtype, self._scratch = block, dtype, scratch
        self._shape = (len(block.parts), block.parts[0].size)
        self._copies = copies_weights(slices.directory.data.dtype, dtype)
        self._slices = list(self._slice_products(slices))

    def _slice_products(self, slices: LoRASlices) -> Iterator[_SliceProducts]:
        all_pairs = [slices.pairs(part.slot) for part in self._block.parts]
        ends = accumulate(slices.out_features)
        for width, end, pairs in zip(
            slices.out_features, ends, zip(*all_pairs, strict=True), strict=True
        ):
            present = [pair for pair in pairs if pair is not None]
            if present:
                yield self._products(present, slice(end - width, end))

    def _products(self, pairs: Sequence[LoRAPair], columns: slice) -> _SliceProducts:
        take, dtype, (parts, rows) = self._scratch.take, self._dtype, self._shape
        out_features, rank = pairs[0].b.shape
        transposes = computes_transposed(dtype, rank, rows)
        shrunk = take("shrunk", (parts, rank, rows) if transposes else (parts, rows, rank), dtype)
        delta = take("delta", (*self._shape, out_features), dtype)
        products = []
        for run in (_Run(0, parts, 0),) if self._copies else _runs(pairs):
            own = slice(run.first, run.first + run.parts)
            if self._copies:
                a, b = (
                    take(use, (parts, *one.shape), dtype)
                    for use, one in zip("ab", pairs[0], strict=True)
                )
            else:
                a, b = _strided(pairs[run.first], run)
            products.append(
                _Product(
                    own,
                    a,
                    b.mT,
                    shrunk[own].mT if transposes else shrunk[own],
                    shrunk[own] if transposes else None,
                    delta[own],
                )
            )
        copied = (tuple(p.a for p in pairs), tuple(p.b for p in pairs)) if self._copies else None
        return _SliceProducts(columns, copied, tuple(products), delta.flatten(0, 1))

    def run(self, y: Tensor, x: Tensor) -> None:
        """Add the block's deltas to y: [tokens, out_features]; x: [tokens, in_features]."""
        rows = self._block.read(x, self._dtype, self._scratch).view(*self._shape, -1)
        for columns, copied, products, delta in self._slices:
            target = y[:, columns]
            in_place = self._rows_in_place(target)
            for own, a, b, shrunk, transposed, own_delta in products:
                if copied is not None:
                    torch.stack(copied[0], out=a)
                    torch.stack(copied[1], out=b.mT)
                if transposed is None:
                    torch.bmm(rows[own], a.mT, out=shrunk)
                else:
                    torch.bmm(a, rows[own].mT, out=transposed)
                if in_place is not None:
                    in_place[own].baddbmm_(shrunk, b)
                    continue
                torch.bmm(shrunk, b, out=own_delta)
            if in_place is None:
                self._block.add(target, delta)

    def _rows_in_place(self, target: Tensor) -> Tensor | None:
        """Return the rows of `y` by part if the second product can be added directly to them."""
        block = self._block
        is_whole = block.rows is None and block.real_indices is None
        if not (is_whole and target.is_contiguous() and target.dtype == self._dtype):
            return None
        return target[block.first : block.first + block.size].view(*self._shape, -1)


def copies_weights(weight_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether weights are copied into one tensor without gaps before a batched product."""
    return weight_dtype != dtype or dtype not in (torch.float32, torch.float64)


def can_batch(block: Block, slices: LoRASlices, dtype: torch.dtype) -> bool:
    """Return whether the weights need no copies, or are copied anyway.

    In float32 a copy costs as much as the calls that a batched product saves.
    """
    if copies_weights(slices.directory.data.dtype, dtype):
        return True
    all_pairs = zip(*(slices.pairs(part.slot) for part in block.parts), strict=True)
    present = ([pair for pair in pairs if pair is not None] for pairs in all_pairs)
    return all(2 * len(_runs(pairs)) <= len(block.parts) for pairs in present if pairs)


def _runs(pairs: Sequence[LoRAPair]) -> list[_Run]:
    """Return the parts divided into runs, each of which is one tensor with a stride."""
    starts = [int(pair.a.storage_offset()) for pair in pairs]
    runs, first = [], 0
    while first < len(starts):
        end = first + 1
        distance = starts[end] - starts[first] if end < len(starts) else 0
        while distance > 0 and end < len(starts) and starts[end] - starts[end - 1] == distance:
            end += 1
        runs.append(_Run(first, end - first, distance if end - first > 1 else 0))
        first = end
    return runs


def _strided(first: LoRAPair, run: _Run) -> tuple[Tensor, Tensor]:
    """Return A and B of a run's parts as views of the arena."""
    a, b = (
        matrix.as_strided((run.parts, *matrix.shape), (run.distance, *matrix.stride()))
        for matrix in first
    )
    return a, b
