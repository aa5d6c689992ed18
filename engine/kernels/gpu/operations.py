"""The Triton implementation: every operation as launches that the batch's bounds determine.

Operations never wait for the device. They allocate memory only for layers and sizes that are new,
so that they can be captured in a graph.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from loradock.engine.kernels.block_attention import BlockAttention
from loradock.engine.kernels.checks import (
    check_embedding,
    check_expand,
    check_experts,
    check_experts_expand,
    check_experts_shrink,
    check_linear,
    check_shrink,
)
from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.gpu.attention import (
    SHARED_ROWS,
    SHARED_TOKENS,
    TritonAttention,
    write_tokens,
)
from loradock.engine.kernels.gpu.embedding import launch_lookup
from loradock.engine.kernels.gpu.experts import (
    launch_experts_expand,
    launch_experts_shrink,
    launch_experts_sum,
)
from loradock.engine.kernels.gpu.fused import add_norm, gate, rms_norm, rotate
from loradock.engine.kernels.gpu.launch import (
    LayerOperandCache,
    LayerOperands,
    Workspace,
    check_operands,
)
from loradock.engine.kernels.gpu.linear import launch_fused
from loradock.engine.kernels.gpu.shrink_expand import (
    launch_expand,
    launch_shrink,
    launch_sum_splits,
)
from loradock.engine.kernels.gpu.tile_configs import (
    LOOKUP,
    ExpertsConfig,
    LinearConfig,
    ShrinkConfig,
    TileConfigs,
    configs_for,
    experts_regime_of,
    regime_of,
)
from loradock.engine.kernels.interface import FusedOperations, Kernels
from loradock.engine.kernels.operands import GroupBounds, Groups, LoRASlices

First = TypeVar("First", bound=Tensor | Sequence[Tensor])
Others = ParamSpec("Others")
Result = TypeVar("Result")


def triton_kernels(batch_invariant: bool) -> Kernels:
    """Create the Triton kernels with their own scratch memory."""
    operations = TritonOperations(batch_invariant)
    return Kernels(
        shrink=on_device_of_first(operations.shrink),
        expand=on_device_of_first(operations.expand),
        linear=on_device_of_first(operations.linear),
        embedding=on_device_of_first(operations.embedding),
        experts=on_device_of_first(operations.experts),
        experts_shrink=on_device_of_first(operations.experts_shrink),
        experts_expand=on_device_of_first(operations.experts_expand),
        plan_linear=operations.plan_linear,
        attention=BlockAttention(
            on_device_of_first(TritonAttention(batch_invariant)),
            on_device_of_first(write_tokens),
            0 if batch_invariant else SHARED_ROWS,
            SHARED_TOKENS,
        ),
        fused=FusedOperations(
            on_device_of_first(rms_norm),
            on_device_of_first(add_norm),
            on_device_of_first(rotate),
            on_device_of_first(gate),
        ),
        variant_of=operations.variant_of,
    )


def on_device_of_first(
    operation: Callable[Concatenate[First, Others], Result],
) -> Callable[Concatenate[First, Others], Result]:
    """Return an operation that runs with the device of its first operand as the current device.

    Triton launches on the current device, which a model on another device does not change.
    """

    def launch(first: First, /, *others: Others.args, **named: Others.kwargs) -> Result:
        device = first.device if isinstance(first, Tensor) else first[0].device
        with _current(device):
            return operation(first, *others, **named)

    return launch


def _current(device: torch.device) -> AbstractContextManager[object]:
    # Triton's interpreter runs on the CPU.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class TritonLinearPlan:
    """A layer's launches for one batch; the tables' addresses don't change between its runs."""

    def __init__(
        self,
        operands: LayerOperands,
        groups: Groups,
        config: LinearConfig,
        workspace: Workspace,
    ) -> None:
        self._operands, self._groups, self._config = operands, groups, config
        self._workspace = workspace
        self._parts_shape = _parts_shape(config.shrink, operands, groups.tokens, groups.bounds)
        self._device = operands.tables[0].device

    def run(self, y: Tensor, x: Tensor) -> None:
        """Launch the kernels on the device of the weights."""
        if not self._groups.tokens:
            return
        with _current(self._device):
            self._launch(y, x)

    def _launch(self, y: Tensor, x: Tensor) -> None:
        operands, groups, config = self._operands, self._groups, self._config
        if config.fused is not None:
            launch_fused(y, x, operands, groups, config.fused)
            return
        parts = self._workspace.take(self._parts_shape, self._device)
        launch_shrink(parts, x, operands, groups, config.shrink)
        launch_expand(y, parts, operands, groups, config.expand)


class TritonOperations:
    """Every operation; each raises ValueError for operands that it does not support."""

    def __init__(self, batch_invariant: bool, configs: TileConfigs | None = None) -> None:
        """`configs`: None for those of the device."""
        self._batch_invariant = batch_invariant
        self._configs = configs
        self._cache = LayerOperandCache()
        self._workspace = Workspace()

    def variant_of(self, bounds: GroupBounds) -> str:
        """Return the regime of a batch of rows, which chooses its launches' constants."""
        return regime_of(bounds, self._batch_invariant)

    def shrink(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
        """Compute as `shrink_reference` does; y: float32."""
        check_shrink(y, x, slices, groups)
        operands = self._operands_of(x, slices, groups.bounds)
        config = self._linear_config(x, groups).shrink
        if not groups.tokens:
            return
        if config.splits == 1:
            launch_shrink(y[None], x, operands, groups, config)
            return
        parts = self._workspace.take((config.splits, *y.shape), y.device)
        launch_shrink(parts, x, operands, groups, config)
        launch_sum_splits(y, parts, operands, groups, config)

    def expand(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
        """Compute as `expand_reference` does; x: float32."""
        check_expand(y, x, slices, groups)
        operands = self._operands_of(y, slices, groups.bounds)
        config = self._linear_config(y, groups).expand
        if groups.tokens:
            launch_expand(y, x[None], operands, groups, config)

    def linear(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
        """Compute as `linear_reference` does."""
        self.plan_linear(y, x, slices, groups).run(y, x)

    def plan_linear(
        self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups
    ) -> TritonLinearPlan:
        """Check the operands, and return the plan of `linear` for all like them."""
        check_linear(y, x, slices, groups)
        operands = self._operands_of(x, slices, groups.bounds)
        config = self._linear_config(x, groups)
        return TritonLinearPlan(operands, groups, config, self._workspace)

    def embedding(
        self, y: Tensor, token_ids: Tensor, slices: LoRASlices, groups: Groups, scale: float
    ) -> None:
        """Compute as `embedding_reference` does."""
        check_embedding(y, token_ids, slices, groups)
        operands = self._operands_of(y, slices, groups.bounds)
        config = self._linear_config(y, groups)
        if not groups.tokens:
            return
        shrunk = self._workspace.take((1, 1, groups.tokens, _padded_rank(groups.bounds)), y.device)
        launch_lookup(shrunk[0, 0], token_ids, operands, groups, scale, LOOKUP)
        launch_expand(y, shrunk, operands, groups, config.expand)

    def experts(
        self, ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
    ) -> None:
        """Compute as `experts_reference` does."""
        check_experts(ys, x, slices, groups)
        operands = self._operands_of(x, slices, groups.bounds)
        config = self._experts_config(x, groups)
        if not len(groups.pairs):
            return
        shape = _parts_shape(config.shrink, operands, len(groups.pairs), groups.bounds)
        parts = self._workspace.take(shape, x.device)
        launch_experts_shrink(parts, x, operands, groups, config.shrink)
        launch_experts_expand(ys, parts, operands, groups, config.expand)

    def experts_shrink(
        self, y: Tensor, x: Tensor, slices: LoRASlices, groups: ExpertGroups
    ) -> None:
        """Compute as `experts_shrink_reference` does; y: float32."""
        check_experts_shrink(y, x, slices, groups)
        operands = self._operands_of(x, slices, groups.bounds)
        config = self._experts_config(x, groups).shrink
        if not len(groups.pairs):
            return
        if config.splits == 1:
            launch_experts_shrink(y[None], x, operands, groups, config)
            return
        parts = self._workspace.take((config.splits, *y.shape), y.device)
        launch_experts_shrink(parts, x, operands, groups, config)
        launch_experts_sum(y, parts, operands, groups, config)

    def experts_expand(
        self, ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
    ) -> None:
        """Compute as `experts_expand_reference` does; x: float32."""
        check_experts_expand(ys, x, slices, groups)
        operands = self._operands_of(ys[0], slices, groups.bounds)
        config = self._experts_config(x, groups).expand
        if len(groups.pairs):
            launch_experts_expand(ys, x[None], operands, groups, config)

    def _operands_of(self, rows: Tensor, slices: LoRASlices, bounds: GroupBounds) -> LayerOperands:
        operands = self._cache.operands_of(slices)
        check_operands(operands, rows, slices.rank_max, bounds)
        return operands

    def _linear_config(self, rows: Tensor, groups: Groups) -> LinearConfig:
        configs = self._configs or _device_configs(rows.device)
        return configs.linear[regime_of(groups.bounds, self._batch_invariant)]

    def _experts_config(self, rows: Tensor, groups: ExpertGroups) -> ExpertsConfig:
        configs = self._configs or _device_configs(rows.device)
        return configs.experts[experts_regime_of(groups.bounds, self._batch_invariant)]


@cache
def _device_configs(device: torch.device) -> TileConfigs:
    """Return a device's tables; Triton's interpreter, which runs on the CPU, uses sm_90's."""
    return configs_for(
        torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    )


def _parts_shape(
    config: ShrinkConfig, operands: LayerOperands, rows: int, bounds: GroupBounds
) -> tuple[int, int, int, int]:
    """Return the shape of a shrink's scratch memory: [splits, slices, rows, >= bounds.rank]."""
    return (config.splits, operands.slice_count, rows, _padded_rank(bounds))


def _padded_rank(bounds: GroupBounds) -> int:
    """Return the columns of scratch rows, such that each row starts at a multiple of 64 bytes."""
    return -(-bounds.rank // 16) * 16
