"""Experts with fully sharded adapters, for experts that are split over the ranks by columns.

This is the scheme of S-LoRA inside the experts. Before the activation A's rows are striped and B's
rows are this rank's columns; shrunk activations are gathered. After it A's columns are those
columns and B's rows are split; shrunk activations are summed, and each rank writes its own columns
of the outputs, before the sum over ranks that the layer computes anyway.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from loradock.engine.kernels.operands import LoRASlices
from loradock.engine.layers.base import SliceShape
from loradock.engine.layers.experts import (
    ExchangedExpertsDelta,
    ExpertsDeltas,
    ExpertsWithLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
)
from loradock.engine.layers.fully_sharded import (
    gather_striped,
    striped_shrink_expand,
    with_striped_a,
)
from loradock.engine.layers.parallel_experts import ParallelExperts
from loradock.engine.punica.wrapper import ShrinkExpand


class ShardedExperts(ExpertsWithLoRA):
    """Base class for both formats. Raises ValueError for experts that are split by expert."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        if isinstance(base_layer, ParallelExperts) and base_layer.expert_range is not None:
            raise ValueError(
                "whole experts per rank leave nothing of their adapters to shard; use either "
                "expert_parallel or fully_sharded_loras"
            )

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The base class's slices, with a striped A, and for the last one split rows of B."""
        *up_slices, down = super().slice_shapes
        shard = replace(down.shard, b_rows=(self._outputs,))
        return (*(with_striped_a(up, self.group) for up in up_slices), down._replace(shard=shard))

    def down_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's columns."""
        return (rows[:, self._outputs.start : self._outputs.stop],)

    @property
    def _outputs(self) -> range:
        return self.group.shard_range(self.whole.out_features, "out_features")

    def _deltas_of(self, up: LoRASlices, down: LoRASlices) -> ExpertsDeltas:
        group = self.group
        return ExpertsDeltas(
            ExchangedExpertsDelta(striped_shrink_expand(up, group), partial(gather_striped, group)),
            ExchangedExpertsDelta(ShrinkExpand(down, down), group.all_reduce),
        )


class FusedMoEWithShardedLoRA(ShardedExperts, FusedMoEWithLoRA):
    """Experts with an A and a B for each projection, fully sharded."""


class FusedMoE3DWithShardedLoRA(ShardedExperts, FusedMoE3DWithLoRA):
    """Experts with one A and one B for gate and up together, fully sharded."""
