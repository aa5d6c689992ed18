"""The operations `shrink` and `expand` on a CPU, for layers that compute between the two products.

Products are computed in the accumulator's dtype.
"""

from itertools import accumulate

import torch
from torch import Tensor

from loradock.engine.kernels.checks import check_expand, check_shrink
from loradock.engine.kernels.cpu.blocks import BatchTiler
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.kernels.threads import threads_for


class CpuShrinkExpand:
    """`shrink` and `expand` for one engine; called by one thread at a time."""

    def __init__(self, tiler: BatchTiler, scratch: Scratch) -> None:
        self._tiler = tiler
        self._scratch = scratch

    def shrink(
        self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """Compute as `shrink_reference` does."""
        check_shrink(y, x, slices, groups)
        with threads_for(self._tiler.product_rows(groups)):
            for slot, reads, writes in self._tiler.slot_rows(groups):
                rows = x.index_select(0, reads).to(y.dtype)
                for index, pair in enumerate(slices.pairs(slot)):
                    if pair is not None:
                        a = self._scratch.transposed("half", pair.a, y.dtype)
                        shrunk = torch.mm(rows, a)[: len(writes)]
                        y[index, :, : len(pair.a)].index_copy_(0, writes, shrunk.mul_(scale))

    def expand(
        self,
        y: Tensor,
        x: Tensor,
        slices: LoRASlices,
        groups: Groups,
        offset: int,
        add_inputs: bool,
    ) -> None:
        """Compute as `expand_reference` does."""
        check_expand(y, x, slices, groups, offset)
        offsets = list(accumulate(slices.out_features, initial=offset))
        with threads_for(self._tiler.product_rows(groups)):
            for slot, reads, writes in self._tiler.slot_rows(groups):
                for index, pair in enumerate(slices.pairs(slot)):
                    if pair is None:
                        continue
                    rows = x[index, :, : pair.b.shape[1]].index_select(0, reads)
                    b = self._scratch.transposed("half", pair.b, x.dtype)
                    delta = torch.mm(rows, b)[: len(writes)]
                    columns = y[:, offsets[index] : offsets[index + 1]]
                    if add_inputs:
                        columns.index_add_(0, writes, delta.to(y.dtype))
                    else:
                        columns.index_copy_(0, writes, delta.to(y.dtype))
