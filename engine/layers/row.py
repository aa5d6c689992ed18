"""Wrappers of linear layers whose inputs are split over the ranks.

Each rank adds the delta of its own inputs, and the base layer's sum over the ranks includes it.
"""

from torch import Tensor, nn

from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape
from loradock.engine.layers.fully_sharded import RowShardedLoRA
from loradock.engine.layers.tensor_parallel import RowParallelLinear
from loradock.engine.layout import Shard
from loradock.engine.parallel import ParallelGroup


class RowParallelLinearWithLoRA(BaseLayerWithLoRA):
    """One slice: A's columns as the inputs are split, B whole."""

    base_layer: RowParallelLinear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every layer whose inputs are split."""
        return isinstance(layer, RowParallelLinear)

    @property
    def group(self) -> ParallelGroup:
        """The ranks over which the inputs are split."""
        return self.base_layer.group

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over the whole layer."""
        base = self.base_layer
        shard = Shard(a_columns=base.columns)
        return (SliceShape(base.whole_in_features, base.out_features, shard=shard),)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of `x @ W.T + delta`, with the bias added once."""
        base = self.base_layer
        x = base.shard_input(x)
        return base.combine_ranks(self.with_lora(base.multiply_shard, x))


class RowParallelLinearWithShardedLoRA(RowShardedLoRA, RowParallelLinearWithLoRA):
    """The same with B's rows split over the ranks."""
