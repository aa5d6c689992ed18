"""The Triton implementation of every operation, put together.

What it is: the operations' contracts over launches that a batch's bounds choose. What it is not: a
kernel. One rule: nothing here reads the device or, once every layer and size was seen, allocates.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.kernels.checks import (
    check_embedding,
    check_expand,
    check_experts,
    check_experts_expand,
    check_experts_shrink,
    check_linear,
    check_shrink,
)
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.gpu.expand import launch_expand
from engine.kernels.gpu.experts import (
    launch_experts_expand,
    launch_experts_shrink,
    launch_experts_sum,
)
from engine.kernels.gpu.fused import launch_fused
from engine.kernels.gpu.launch import Layer, Layers, Workspace, check_operands
from engine.kernels.gpu.lookup import launch_lookup
from engine.kernels.gpu.shrink import launch_shrink, launch_sum_splits
from engine.kernels.gpu.tile_configs import (
    LOOKUP,
    ExpertsPlan,
    Plan,
    Plans,
    experts_regime_of,
    plans_for,
    regime_of,
)
from engine.kernels.interface import Kernels
from engine.kernels.operands import GroupBounds, Groups, LoRASlices


def triton_kernels(batch_invariant: bool) -> Kernels:
    """The Triton kernels with scratch memory of their own."""
    operations = TritonOperations(batch_invariant)
    return Kernels(
        shrink=operations.shrink,
        expand=operations.expand,
        linear=operations.linear,
        embedding=operations.embedding,
        experts=operations.experts,
        experts_shrink=operations.experts_shrink,
        experts_expand=operations.experts_expand,
    )


class TritonOperations:
    """Every operation; each raises ValueError for operands that it can't take."""

    def __init__(self, batch_invariant: bool, plans: Plans | None = None) -> None:
        """`plans` None takes the device's own."""
        self._batch_invariant = batch_invariant
        self._plans = plans
        self._layers = Layers()
        self._workspace = Workspace()

    def shrink(
        self, y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """See `engine.kernels.reference.shrink`; y: float32."""
        check_shrink(y, x, weights, groups)
        layer = self._layer(x, weights, groups.bounds)
        plan = self._plan(x, groups).shrink
        if not groups.tokens:
            return
        if plan.splits == 1:
            launch_shrink(y[None], x, layer, groups, scale, plan)
            return
        parts = self._workspace.take((plan.splits, *y.shape), y.device)
        launch_shrink(parts, x, layer, groups, scale, plan)
        launch_sum_splits(y, parts, layer, groups, plan)

    # The contract has six; `self` is the seventh.
    def expand(
        self,
        y: Tensor,
        x: Tensor,
        weights: LoRASlices,
        groups: Groups,
        offset: int,
        add_inputs: bool,
    ) -> None:
        """See `engine.kernels.reference.expand`; x: float32."""
        check_expand(y, x, weights, groups, offset)
        layer = self._layer(y, weights, groups.bounds)
        plan = self._plan(y, groups).expand
        if groups.tokens:
            launch_expand(y, x[None], layer, groups, plan, offset=offset, add_inputs=add_inputs)

    def linear(
        self, y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """See `engine.kernels.reference.linear`."""
        check_linear(y, x, weights, groups)
        layer = self._layer(x, weights, groups.bounds)
        plan = self._plan(x, groups)
        if not groups.tokens:
            return
        if plan.fused is not None:
            launch_fused(y, x, layer, groups, scale, plan.fused)
            return
        shape = (plan.shrink.splits, layer.slices, groups.tokens, _rank_room(groups.bounds))
        parts = self._workspace.take(shape, x.device)
        launch_shrink(parts, x, layer, groups, scale, plan.shrink)
        launch_expand(y, parts, layer, groups, plan.expand)

    def embedding(
        self, y: Tensor, token_ids: Tensor, weights: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """See `engine.kernels.reference.embedding`."""
        check_embedding(y, token_ids, weights, groups)
        layer = self._layer(y, weights, groups.bounds)
        plan = self._plan(y, groups)
        if not groups.tokens:
            return
        shrunk = self._workspace.take((1, 1, groups.tokens, _rank_room(groups.bounds)), y.device)
        launch_lookup(shrunk[0, 0], token_ids, layer, groups, scale, LOOKUP)
        launch_expand(y, shrunk, layer, groups, plan.expand)

    def experts(
        self, ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups
    ) -> None:
        """See `engine.kernels.experts`."""
        check_experts(ys, x, weights, groups)
        layer = self._layer(x, weights, groups.bounds)
        plan = self._experts_plan(x, groups)
        if not len(groups.pairs):
            return
        shape = (plan.shrink.splits, layer.slices, len(groups.pairs), _rank_room(groups.bounds))
        parts = self._workspace.take(shape, x.device)
        launch_experts_shrink(parts, x, layer, groups, plan.shrink)
        launch_experts_expand(ys, parts, layer, groups, plan.expand)

    def experts_shrink(
        self, y: Tensor, x: Tensor, weights: LoRASlices, groups: ExpertGroups
    ) -> None:
        """See `engine.kernels.experts_shrink`; y: float32."""
        check_experts_shrink(y, x, weights, groups)
        layer = self._layer(x, weights, groups.bounds)
        plan = self._experts_plan(x, groups).shrink
        if not len(groups.pairs):
            return
        if plan.splits == 1:
            launch_experts_shrink(y[None], x, layer, groups, plan)
            return
        parts = self._workspace.take((plan.splits, *y.shape), y.device)
        launch_experts_shrink(parts, x, layer, groups, plan)
        launch_experts_sum(y, parts, layer, groups, plan)

    def experts_expand(
        self, ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups
    ) -> None:
        """See `engine.kernels.experts_expand`; x: float32."""
        check_experts_expand(ys, x, weights, groups)
        layer = self._layer(ys[0], weights, groups.bounds)
        plan = self._experts_plan(x, groups).expand
        if len(groups.pairs):
            launch_experts_expand(ys, x[None], layer, groups, plan)

    def _layer(self, rows: Tensor, weights: LoRASlices, bounds: GroupBounds) -> Layer:
        layer = self._layers.of(weights)
        check_operands(layer, rows, self._layers.rank_of(weights), bounds)
        return layer

    def _plan(self, rows: Tensor, groups: Groups) -> Plan:
        plans = self._plans or _device_plans(rows.device)
        return plans.linear[regime_of(groups.bounds, self._batch_invariant)]

    def _experts_plan(self, rows: Tensor, groups: ExpertGroups) -> ExpertsPlan:
        plans = self._plans or _device_plans(rows.device)
        return plans.experts[experts_regime_of(groups.bounds, self._batch_invariant)]


@cache
def _device_plans(device: torch.device) -> Plans:
    """A device's tables; Triton's interpreter, which runs on the CPU, takes those of one."""
    return plans_for(torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0))


def _rank_room(bounds: GroupBounds) -> int:
    """The width of scratch rows, so that each starts at a multiple of 64 bytes."""
    return -(-bounds.rank // 16) * 16
