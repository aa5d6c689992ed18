"""Long runs: two products for each, read and written where they are.

What it is: the way of groups for which a product's time is that of its numbers. What it is not: a
plan; nothing is made ready, for with such a batch a layer's mapping is seldom met twice. One rule:
no more than one block of rows is gathered or converted at once.
"""

from itertools import accumulate

import torch
from torch import Tensor

from engine.kernels.cpu.blocks import BLOCK_ROWS, Run
from engine.kernels.cpu.layer import computation_dtypes
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
        for slot, first, end, rows in self._runs:
            x_rows = x[first:end] if rows is None else x.index_select(0, rows)
            x_rows = x_rows.to(self._dtype)
            for columns, pair in zip(self._columns, self._weights.pairs(slot), strict=True):
                if pair is None:
                    continue
                shrunk = self._scratch.take("shrunk", (len(x_rows), len(pair.a)), self._dtype)
                torch.mm(x_rows, pair.a.to(self._dtype).T, out=shrunk)
                if rows is None:
                    self._add(y[first:end, columns], shrunk, pair, scale)
                else:
                    delta = torch.mm(shrunk, pair.b.to(self._dtype).T).mul_(scale)
                    y[:, columns].index_add_(0, rows, delta.to(y.dtype))

    def _add(self, target: Tensor, shrunk: Tensor, pair: Pair, scale: float) -> None:
        """Add a run's delta where it belongs: [rows, out_features]."""
        if self._in_place:
            target.addmm_(shrunk, pair.b.T, alpha=scale)
        else:
            wide = target.to(self._dtype).addmm_(shrunk, pair.b.to(self._dtype).T, alpha=scale)
            target.copy_(wide)


def _bounded(run: Run) -> list[Run]:
    """The same rows in runs of one block at most; those that lie apart are so already."""
    if run.rows is not None:
        return [run]
    starts = range(run.first, run.end, BLOCK_ROWS)
    return [run._replace(first=start, end=min(start + BLOCK_ROWS, run.end)) for start in starts]
