"""Experts with fully sharded adapters: each half of every product is split over the ranks.

What it is: S-LoRA's scheme inside the experts that ranks share by columns. What it is not: for
experts that are shared whole, whose adapters are shared with them. One rule: what crosses between
ranks is what was shrunk, float32 and as wide as a rank: gathered before the activation, summed
behind it.

Before the activation A's rows are dealt out and B's rows are this rank's columns. Behind it A's
columns are those columns, and B's rows are split: each rank writes its own columns of the outputs,
before the sum that the layer makes anyway.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from engine.kernels.operands import LoRASlices
from engine.layers.base import SliceShape
from engine.layers.experts import (
    Deltas,
    ExchangedDelta,
    ExpertsWithLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
)
from engine.layers.fully_sharded import dealt, gather_ranks, halves_of_dealt
from engine.layers.parallel_experts import ParallelExperts
from engine.punica.wrapper import Halves


class ShardedExperts(ExpertsWithLoRA):
    """What both formats share. Raises ValueError for experts that are shared whole."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        if isinstance(base_layer, ParallelExperts) and base_layer.kept is not None:
            raise ValueError(
                "experts that ranks share whole leave nothing of their adapters to shard; take "
                "expert_parallel or fully_sharded_loras"
            )

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The family's slices, with A's rows dealt out, and of the last one B's rows split."""
        *ups, down = super().slice_shapes
        shard = replace(down.shard, b_rows=(self._outputs,))
        return (*(dealt(up, self.group) for up in ups), down._replace(shard=shard))

    def down_views(self, rows: Tensor) -> tuple[Tensor, ...]:
        """This rank's columns."""
        return (rows[:, self._outputs.start : self._outputs.stop],)

    @property
    def _outputs(self) -> range:
        return self.group.part_of(self.whole.out_features, "out_features")

    def _deltas_of(self, up: LoRASlices, down: LoRASlices) -> Deltas:
        group = self.group
        return Deltas(
            ExchangedDelta(halves_of_dealt(up, group), partial(gather_ranks, group)),
            ExchangedDelta(Halves(down, down), group.all_reduce),
        )


class FusedMoEWithShardedLoRA(ShardedExperts, FusedMoEWithLoRA):
    """Experts with an A and a B for each projection, fully sharded."""


class FusedMoE3DWithShardedLoRA(ShardedExperts, FusedMoE3DWithLoRA):
    """Experts with one A and one B for gate and up together, fully sharded."""
