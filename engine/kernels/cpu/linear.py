"""The fused pair on a CPU: plans by layer, made when the mapping or the directory changes.

What it is: a memory of plans, and the way to them. What it is not: arithmetic; the strategies have
files of their own. One rule: a plan is used for exactly the mapping and the edition of the
directory that it was made for.
"""

from typing import NamedTuple

from torch import Tensor

from engine.kernels.checks import Signature, check_linear, signature
from engine.kernels.cpu.blocks import Cutter, long_rows_of
from engine.kernels.cpu.costs import Choice, Plan, cheapest
from engine.kernels.cpu.grouped import Grouped
from engine.kernels.cpu.layer_block import LayerBlock, computation_dtypes, layer_block, wide_dtype
from engine.kernels.cpu.long_groups import LongRuns
from engine.kernels.cpu.scratch import Scratch
from engine.kernels.operands import Groups, LoRASlices
from engine.kernels.threads import threads_for


class _LayerPlan(NamedTuple):
    """What a layer does, and for what that was found; `groups` is compared by identity.

    `rows`: the most that one group's product has.
    """

    groups: Groups
    edition: int
    signature: Signature
    rows: int
    plans: tuple[Plan | LongRuns, ...]


class CpuLinear:
    """`linear` for one engine; called by one thread at a time."""

    def __init__(self, cutter: Cutter, scratch: Scratch) -> None:
        self._cutter = cutter
        self._scratch = scratch
        self._plans: dict[LoRASlices, _LayerPlan] = {}
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._chosen_for: Groups | None = None

    def __call__(
        self, y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """As `linear_reference`."""
        plan = self._plans.get(weights)
        if (
            plan is None
            or plan.groups is not groups
            or plan.edition != weights.directory.edition.number
            or plan.signature != signature(y, x)
        ):
            check_linear(y, x, weights, groups)
            plan = self._plans[weights] = self._plan(y, x, weights, groups)
        with threads_for(plan.rows):
            for part in plan.plans:
                part.run(y, x, scale)

    def _plan(self, y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups) -> _LayerPlan:
        plans: list[Plan | LongRuns] = []
        computed = computation_dtypes(x.dtype, weights.directory.data.dtype)[0]
        runs, blocks = self._cutter(groups, long_rows_of(computed))
        if runs:
            plans.append(LongRuns(runs, weights, x.dtype, self._scratch))
        for block in blocks:
            layer = layer_block(weights, block, x.dtype)
            if layer is not None:
                strategy, dtype = self._choose(layer, groups)
                plans.append(strategy(layer, dtype, self._scratch))
        edition = weights.directory.edition.number
        rows = self._cutter.product_rows(groups)
        return _LayerPlan(groups, edition, signature(y, x), rows, tuple(plans))

    def _choose(self, layer: LayerBlock, groups: Groups) -> Choice:
        """The cheapest strategy, found once for layers that are alike.

        With batch_invariant there is one way only, whatever else would be cheaper.
        """
        if self._cutter.batch_invariant:
            return Grouped, wide_dtype(layer.activations, layer.weights)
        if self._chosen_for is not groups:
            self._chosen_for = groups
            self._choices.clear()
        key = layer.signature
        if key not in self._choices:
            self._choices[key] = cheapest(layer)
        return self._choices[key]
