"""The `embedding` operation on a CPU: rows of A by token, times B in the accumulator's dtype."""

import torch
from torch import Tensor

from loradock.engine.kernels.checks import check_embedding
from loradock.engine.kernels.cpu.blocks import BatchTiler
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from loradock.engine.kernels.threads import threads_for


class CpuEmbedding:
    """`embedding` for one engine; called by one thread at a time."""

    def __init__(self, tiler: BatchTiler, scratch: Scratch) -> None:
        self._tiler = tiler
        self._scratch = scratch

    def __call__(
        self, y: Tensor, token_ids: Tensor, slices: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """Compute as `embedding_reference` does."""
        check_embedding(y, token_ids, slices, groups)
        dtype = accumulator_dtype(y.dtype)
        with threads_for(self._tiler.product_rows(groups)):
            for slot, reads, writes in self._tiler.slot_rows(groups):
                (pair,) = slices.pairs(slot)
                if pair is not None:
                    rows = pair.a.index_select(0, token_ids.index_select(0, reads)).to(dtype)
                    b = self._scratch.transposed("half", pair.b, dtype)
                    delta = torch.mm(rows, b)[: len(writes)]
                    y.index_add_(0, writes, delta.mul_(scale).to(y.dtype))
