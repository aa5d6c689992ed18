"""The `linear` operation on a CPU: both products of a layer's delta, by one of two strategies.

Groups of few rows whose adapters have equal ranks are computed together (`Batched`), all others one
by one (`Looped`).
"""

import torch
from torch import Tensor

from loradock.engine.kernels.checks import check_linear
from loradock.engine.kernels.cpu.batched import Batched, can_batch
from loradock.engine.kernels.cpu.blocks import BatchTiler, Block, min_long_rows
from loradock.engine.kernels.cpu.dtypes import looped_dtype, native_dtype, wide_dtype
from loradock.engine.kernels.cpu.looped import Looped
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.kernels.threads import THREADED_ROWS


class CpuLinearPlan:
    """One layer's delta for one batch; valid for one version of the directory.

    `rows`: the most rows of one group's product.
    """

    def __init__(self, rows: int, strategies: tuple[Looped | Batched, ...]) -> None:
        self._rows = rows
        self._strategies = strategies

    def run(self, y: Tensor, x: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times the delta of x to y, in place."""
        # As `threads_for` does, without its three Python calls for each layer of a step.
        threads = torch.get_num_threads() if self._rows < THREADED_ROWS else 1
        if threads > 1:
            torch.set_num_threads(1)
        try:
            for strategy in self._strategies:
                strategy.run(y, x, scale)
        finally:
            if threads > 1:
                torch.set_num_threads(threads)


class CpuLinear:
    """`linear` for one engine; called by one thread at a time."""

    def __init__(self, tiler: BatchTiler, scratch: Scratch) -> None:
        self._tiler = tiler
        self._scratch = scratch

    def __call__(
        self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """Compute as `linear_reference` does."""
        self.plan(y, x, slices, groups).run(y, x, scale)

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


def _weights_max(block: Block, slices: LoRASlices) -> int:
    """Return the weights of the largest A or B of the block's adapters."""
    rank = max(rank for part in block.parts for rank in slices.ranks(part.slot))
    return rank * max(slices.in_features, *slices.out_features)
