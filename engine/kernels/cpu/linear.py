"""The products of a layer's delta on a CPU.

`linear` computes both at once, by one of two strategies: groups of few rows whose adapters have
equal ranks together (`Batched`), all others one by one (`Looped`). `shrink` and `expand` are for
layers that compute between the two products; they and `embedding` compute in the accumulator's
dtype, group by group.
"""

from itertools import accumulate

import torch
from torch import Tensor

from loradock.engine.kernels.checks import (
    check_embedding,
    check_expand,
    check_linear,
    check_shrink,
)
from loradock.engine.kernels.cpu.batched import Batched, can_batch
from loradock.engine.kernels.cpu.blocks import BatchTiler, Block, min_long_rows
from loradock.engine.kernels.cpu.dtypes import looped_dtype, native_dtype, wide_dtype
from loradock.engine.kernels.cpu.looped import Looped
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from loradock.engine.kernels.threads import THREADED_ROWS, threads_for


class CpuLinearPlan:
    """One layer's delta for one batch; valid for one version of the directory.

    `rows`: the most rows of one group's product.
    """

    def __init__(self, rows: int, strategies: tuple[Looped | Batched, ...]) -> None:
        self._rows = rows
        self._strategies = strategies

    def run(self, y: Tensor, x: Tensor) -> None:
        """Add the delta of x to y, in place."""
        # As `threads_for` does, without its three Python calls for each layer of a step.
        threads = torch.get_num_threads() if self._rows < THREADED_ROWS else 1
        if threads > 1:
            torch.set_num_threads(1)
        try:
            for strategy in self._strategies:
                strategy.run(y, x)
        finally:
            if threads > 1:
                torch.set_num_threads(threads)


class CpuProducts:
    """`linear`, `shrink`, `expand` and `embedding` for one engine; called by one thread at a time.

    Each computes as its reference does.
    """

    def __init__(self, tiler: BatchTiler, scratch: Scratch) -> None:
        self._tiler = tiler
        self._scratch = scratch

    def linear(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
        """Add the delta of x to y, in place."""
        self.plan(y, x, slices, groups).run(y, x)

    def plan(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> CpuLinearPlan:
        """Check the operands, and return the plan for all of these shapes, strides and dtypes."""
        check_linear(y, x, slices, groups)
        strategies = self._strategies(x.dtype, slices, groups)
        return CpuLinearPlan(self._tiler.product_rows(groups), tuple(strategies))

    def _strategies(
        self, activation_dtype: torch.dtype, slices: LoRASlices, groups: Groups
    ) -> list[Looped | Batched]:
        weight_dtype = slices.directory.data.dtype
        native = native_dtype(activation_dtype, weight_dtype)
        in_place = activation_dtype == weight_dtype == native
        ranks = tuple([slices.ranks(span.slot) for span in groups.spans])
        tiling = self._tiler(groups, ranks, in_place, min_long_rows(native))
        if self._tiler.batch_invariant:
            wide = wide_dtype(activation_dtype, weight_dtype)
            return [
                Looped(block, slices, activation_dtype, wide, self._scratch)
                for block in tiling.looped
            ]
        looped, strategies = list(tiling.looped), list[Looped | Batched]()
        for block in tiling.batched:
            if can_batch(block, slices, native):
                strategies.append(Batched(block, slices, native, self._scratch))
            else:
                looped.append(block)
        for block in looped:
            dtype = looped_dtype(native, max(block.sizes), _weights_max(block, slices))
            strategies.append(Looped(block, slices, activation_dtype, dtype, self._scratch))
        return strategies

    def shrink(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
        """Write the first product of x to y."""
        check_shrink(y, x, slices, groups)
        with threads_for(self._tiler.product_rows(groups)):
            for slot, reads, writes in self._tiler.slot_rows(groups):
                rows = x.index_select(0, reads).to(y.dtype)
                for index, pair in enumerate(slices.pairs(slot)):
                    if pair is not None:
                        a = self._scratch.transposed("half", pair.a, y.dtype)
                        shrunk = torch.mm(rows, a)[: len(writes)]
                        y[index, :, : len(pair.a)].index_copy_(0, writes, shrunk)

    def expand(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
        """Add the second product of x to y."""
        check_expand(y, x, slices, groups)
        offsets = list(accumulate(slices.out_features, initial=0))
        with threads_for(self._tiler.product_rows(groups)):
            for slot, reads, writes in self._tiler.slot_rows(groups):
                for index, pair in enumerate(slices.pairs(slot)):
                    if pair is None:
                        continue
                    rows = x[index, :, : pair.b.shape[1]].index_select(0, reads)
                    b = self._scratch.transposed("half", pair.b, x.dtype)
                    delta = torch.mm(rows, b)[: len(writes)]
                    columns = y[:, offsets[index] : offsets[index + 1]]
                    columns.index_add_(0, writes, delta.to(y.dtype))

    def embedding(
        self, y: Tensor, token_ids: Tensor, slices: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """Add `scale` times the delta of a token embedding to y."""
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


def _weights_max(block: Block, slices: LoRASlices) -> int:
    """Return the weights of the largest A or B of the block's adapters."""
    rank = max(rank for part in block.parts for rank in slices.ranks(part.slot))
    return rank * max(slices.in_features, *slices.out_features)
