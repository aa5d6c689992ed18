"""The `linear` operation on a CPU: both products of a layer's delta, by the cheapest strategy.

A layer's plan is used only for the mapping and the directory version that it was made for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.checks import check_linear
from loradock.engine.kernels.cpu.blocks import BatchTiler, RowRun, min_long_rows
from loradock.engine.kernels.cpu.costs import (
    DEFAULT_COSTS,
    CostTable,
    LongLayer,
    Strategy,
    StrategyChoice,
    cheapest_dtype,
    cheapest_strategy,
)
from loradock.engine.kernels.cpu.grouped import Grouped
from loradock.engine.kernels.cpu.layer_block import (
    LayerBlock,
    computation_dtypes,
    layer_block,
    wide_dtype,
)
from loradock.engine.kernels.cpu.long_groups import LongGroups
from loradock.engine.kernels.cpu.scratch import Scratch
from loradock.engine.kernels.operand_memo import OperandMemo
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.kernels.threads import threads_for


class _LayerPlan(NamedTuple):
    """The strategies that compute a layer's delta; `rows`: the most rows of one group's product."""

    rows: int
    strategies: tuple[Strategy | LongGroups, ...]


class CpuLinear:
    """`linear` for one engine; called by one thread at a time."""

    def __init__(
        self, tiler: BatchTiler, scratch: Scratch, costs: CostTable = DEFAULT_COSTS
    ) -> None:
        self._costs = costs
        self._tiler = tiler
        self._scratch = scratch
        self._plans: OperandMemo[_LayerPlan] = OperandMemo()
        self._choices: dict[tuple[object, ...], StrategyChoice] = {}
        self._chosen_for: Groups | None = None

    def __call__(
        self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """Compute as `linear_reference` does."""
        plan = self._plans.get(y, x, slices, groups)
        if plan is None:
            check_linear(y, x, slices, groups)
            plan = self._plan(x, slices, groups)
            self._plans.set(y, x, slices, groups, plan)
        with threads_for(plan.rows):
            for strategy in plan.strategies:
                strategy.run(y, x, scale)

    def _plan(self, x: Tensor, slices: LoRASlices, groups: Groups) -> _LayerPlan:
        strategies: list[Strategy | LongGroups] = []
        dtype = computation_dtypes(x.dtype, slices.directory.data.dtype)[0]
        runs, blocks = self._tiler(groups, min_long_rows(dtype))
        if runs:
            strategies.append(self._long_groups(runs, x.dtype, slices))
        for block in blocks:
            layer = layer_block(slices, block, x.dtype)
            if layer is not None:
                strategy, dtype = self._choose(layer, groups)
                strategies.append(strategy(layer, dtype, self._scratch))
        return _LayerPlan(self._tiler.product_rows(groups), tuple(strategies))

    def _long_groups(
        self, runs: tuple[RowRun, ...], activation_dtype: torch.dtype, slices: LoRASlices
    ) -> LongGroups:
        """Return the strategy for long groups, in the dtype that is the cheapest."""
        ranks = [
            tuple([0 if pair is None else len(pair.a) for pair in slices.pairs(run.slot)])
            for run in runs
        ]
        layer = LongLayer(
            activation_dtype,
            slices.directory.data.dtype,
            slices.in_features,
            tuple(slices.out_features),
            tuple(zip([run.size for run in runs], ranks, strict=True)),
        )
        dtype = cheapest_dtype(layer, self._costs)
        return LongGroups(runs, slices, activation_dtype, dtype, self._scratch)

    def _choose(self, layer: LayerBlock, groups: Groups) -> StrategyChoice:
        """Return the cheapest strategy, computed once for layers with equal signatures.

        With `batch_invariant` only one strategy is used, even where another is cheaper.
        """
        if self._tiler.batch_invariant:
            return Grouped, wide_dtype(layer.activation_dtype, layer.weight_dtype)
        if self._chosen_for is not groups:
            self._chosen_for = groups
            self._choices.clear()
        key = layer.signature
        if key not in self._choices:
            self._choices[key] = cheapest_strategy(layer, self._costs)
        return self._choices[key]
