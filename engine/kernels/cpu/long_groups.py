"""Strategy for long groups: two products per run, whose rows are read and written in place.

Nothing is prepared, because a mapping with long groups (a prefill) rarely occurs twice. At most one
block of rows is gathered or converted at once.
"""

from itertools import accumulate

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.blocks import BLOCK_ROWS, RowRun
from loradock.engine.kernels.cpu.layer_block import computes_transposed
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import LoRAPair, LoRASlices


class LongGroups:
    """`y += scale * x @ A.T @ B.T`, by run and slice."""

    def __init__(
        self,
        runs: tuple[RowRun, ...],
        slices: LoRASlices,
        activation_dtype: torch.dtype,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        """`dtype`: that of the products, one of `computation_dtypes`."""
        self._slices = slices
        self._scratch = scratch
        self._dtype = dtype
        self._in_place = activation_dtype == slices.directory.data.dtype == dtype
        bounded = (
            runs if self._in_place else [part for run in runs for part in _split_by_block(run)]
        )
        self._runs = tuple(bounded)
        offsets = accumulate(slices.out_features, initial=0)
        self._columns = [
            slice(offset, offset + out_features)
            for offset, out_features in zip(offsets, slices.out_features, strict=False)
        ]

    def run(self, y: Tensor, x: Tensor, scale: float) -> None:
        """Add the runs' deltas to y: [tokens, out_features]; x: [tokens, in_features]."""
        targets = [y[:, columns] for columns in self._columns]
        for run in self._runs:
            x_rows = x[run.first : run.end] if run.rows is None else x.index_select(0, run.rows)
            if not self._in_place:
                x_rows = x_rows.to(self._dtype)
            for target, pair in zip(targets, self._slices.pairs(run.slot), strict=True):
                if pair is not None:
                    self._add(target, x_rows, run, pair, scale)

    def _add(self, y: Tensor, x_rows: Tensor, run: RowRun, pair: LoRAPair, scale: float) -> None:
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
        """Return `x_rows @ a.T`: [rows, rank]."""
        rows, rank = len(x_rows), len(a)
        if computes_transposed(self._dtype, rank, rows):
            return torch.mm(a, x_rows.T, out=self._take((rank, rows))).T
        return torch.mm(x_rows, a.T, out=self._take((rows, rank)))

    def _take(self, shape: tuple[int, int]) -> Tensor:
        return self._scratch.take("shrunk", shape, self._dtype)


def _split_by_block(run: RowRun) -> list[RowRun]:
    """Return the same rows in runs of at most one block; gathered rows are so already."""
    if run.rows is not None:
        return [run]
    starts = range(run.first, run.end, BLOCK_ROWS)
    return [run._replace(first=start, end=min(start + BLOCK_ROWS, run.end)) for start in starts]
