"""Long runs: two products for each, read and written where they are.

What it is: the way of groups for which a product's time is that of its numbers. What it is not: a
plan; nothing is made ready, for with such a batch a layer's mapping is seldom met twice. One rule:
no more than one block of rows is gathered or converted at once.
"""

from itertools import accumulate

import torch
from torch import Tensor

from engine.kernels.cpu.blocks import BLOCK_ROWS, Run
from engine.kernels.cpu.layer_block import computation_dtypes, is_turned
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.operands import LoRASlices, Pair


class LongRuns:
    """`y += scale * x @ A.T @ B.T`, run by run and slice by slice."""

    def __init__(
        self,
        runs: tuple[Run, ...],
        weights: LoRASlices,
        activations: torch.dtype,
        scratch: Scratch,
    ) -> None:
        self._weights = weights
        self._scratch = scratch
        stored = weights.directory.data.dtype
        self._dtype = computation_dtypes(activations, stored)[0]
        self._in_place = activations == stored == self._dtype
        bounded = runs if self._in_place else [part for run in runs for part in _bounded(run)]
        self._runs = tuple(bounded)
        firsts = accumulate(weights.out_features, initial=0)
        self._columns = [
            slice(first, first + width)
            for first, width in zip(firsts, weights.out_features, strict=False)
        ]

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the runs' deltas to y: [tokens, width]; x: [tokens, in_features]."""
        slices = [y[:, columns] for columns in self._columns]
        for run in self._runs:
            x_rows = x[run.first : run.end] if run.rows is None else x.index_select(0, run.rows)
            if not self._in_place:
                x_rows = x_rows.to(self._dtype)
            for target, pair in zip(slices, self._weights.pairs(run.slot), strict=True):
                if pair is not None:
                    self._add(target, x_rows, run, pair, scale)

    def _add(self, y: Tensor, x_rows: Tensor, run: Run, pair: Pair, scale: float) -> None:
        """Add a run's delta to one slice: y [tokens, out_features], x_rows [rows, in_features]."""
        a, b = pair if self._in_place else (pair.a.to(self._dtype), pair.b.to(self._dtype))
        shrunk = self._shrunk(x_rows, a)
        if run.rows is not None:
            delta = torch.mm(shrunk, b.T).mul_(scale)
            y.index_add_(0, run.rows, delta.to(y.dtype))
        elif self._in_place:
            y[run.first : run.end].addmm_(shrunk, b.T, alpha=scale)
        else:
            target = y[run.first : run.end]
            target.copy_(target.to(self._dtype).addmm_(shrunk, b.T, alpha=scale))

    def _shrunk(self, x_rows: Tensor, a: Tensor) -> Tensor:
        """`x_rows @ a.T`: [rows, rank]."""
        rows, rank = len(x_rows), len(a)
        if is_turned(self._dtype, rank, rows):
            return torch.mm(a, x_rows.T, out=self._take((rank, rows))).T
        return torch.mm(x_rows, a.T, out=self._take((rows, rank)))

    def _take(self, shape: tuple[int, int]) -> Tensor:
        return self._scratch.take("shrunk", shape, self._dtype)


def _bounded(run: Run) -> list[Run]:
    """The same rows in runs of one block at most; those that lie apart are so already."""
    if run.rows is not None:
        return [run]
    starts = range(run.first, run.end, BLOCK_ROWS)
    return [run._replace(first=start, end=min(start + BLOCK_ROWS, run.end)) for start in starts]
