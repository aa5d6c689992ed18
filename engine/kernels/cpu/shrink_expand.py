"""The operations that are half a LoRA product on a CPU: shrink, expand, and the embedding's expand.

What it is: the loops over a block's parts. What it is not: the fused pair, which most layers use;
these serve layers that have something to do between the halves, and token embeddings. One rule:
products are made in the accumulator's dtype.
"""

from itertools import accumulate

import torch
from torch import Tensor

from engine.kernels.checks import check_embedding, check_expand, check_shrink
from engine.kernels.cpu.blocks import Cutter
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from engine.kernels.threads import threads_for


class CpuHalves:
    """`shrink`, `expand` and `embedding` for one engine; called by one thread at a time."""

    def __init__(self, cutter: Cutter, scratch: Scratch) -> None:
        self._cutter = cutter
        self._scratch = scratch

    def shrink(
        self, y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """As `shrink_reference`."""
        check_shrink(y, x, weights, groups)
        with threads_for(self._cutter.product_rows(groups)):
            for slot, reads, writes in self._cutter.pieces(groups):
                rows = x.index_select(0, reads).to(y.dtype)
                for place, pair in enumerate(weights.pairs(slot)):
                    if pair is not None:
                        shrunk = torch.mm(rows, self._fetch(pair.a, y.dtype))[: len(writes)]
                        y[place, :, : len(pair.a)].index_copy_(0, writes, shrunk.mul_(scale))

    def expand(
        self,
        y: Tensor,
        x: Tensor,
        weights: LoRASlices,
        groups: Groups,
        offset: int,
        add_inputs: bool,
    ) -> None:
        """As `expand_reference`."""
        check_expand(y, x, weights, groups, offset)
        firsts = list(accumulate(weights.out_features, initial=offset))
        with threads_for(self._cutter.product_rows(groups)):
            for slot, reads, writes in self._cutter.pieces(groups):
                for place, pair in enumerate(weights.pairs(slot)):
                    if pair is None:
                        continue
                    rows = x[place, :, : pair.b.shape[1]].index_select(0, reads)
                    delta = torch.mm(rows, self._fetch(pair.b, x.dtype))[: len(writes)]
                    columns = y[:, firsts[place] : firsts[place + 1]]
                    if add_inputs:
                        columns.index_add_(0, writes, delta.to(y.dtype))
                    else:
                        columns.index_copy_(0, writes, delta.to(y.dtype))

    def embedding(
        self, y: Tensor, token_ids: Tensor, weights: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """As `embedding_reference`."""
        check_embedding(y, token_ids, weights, groups)
        dtype = accumulator_dtype(y.dtype)
        with threads_for(self._cutter.product_rows(groups)):
            for slot, reads, writes in self._cutter.pieces(groups):
                (pair,) = weights.pairs(slot)
                if pair is not None:
                    rows = pair.a.index_select(0, token_ids.index_select(0, reads)).to(dtype)
                    delta = torch.mm(rows, self._fetch(pair.b, dtype))[: len(writes)]
                    y.index_add_(0, writes, delta.mul_(scale).to(y.dtype))

    def _fetch(self, matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """The transpose in `dtype`, until the next one is fetched."""
        if matrix.dtype == dtype:
            return matrix.T
        return self._scratch.take("half", tuple(matrix.shape), dtype).copy_(matrix).T
