"""Wrappers of linear layers whose outputs are split over the ranks.

B is split as the base layer's weight is, so a delta belongs to the columns that it is added to.
"""

from torch import Tensor, nn

from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape
from loradock.engine.layers.fully_sharded import ColumnShardedLoRA
from loradock.engine.layers.tensor_parallel import ColumnParallelLinear
from loradock.engine.layout import Shard
from loradock.engine.parallel import ParallelGroup


class ColumnParallelLinearWithLoRA(BaseLayerWithLoRA):
    """One slice: A whole, B's rows as the base layer's.

    They may be several ranges, for example for a pair of projections that a checkpoint stores as
    one.
    """

    base_layer: ColumnParallelLinear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every layer whose outputs are split."""
        return isinstance(layer, ColumnParallelLinear)

    @property
    def group(self) -> ParallelGroup:
        """The ranks over which the outputs are split."""
        return self.base_layer.group

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over the whole layer."""
        base = self.base_layer
        shard = Shard(b_rows=base.rows)
        return (SliceShape(base.in_features, base.whole_out_features, shard=shard),)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns of `x @ W.T + bias + delta`, or all if the layer gathers."""
        base = self.base_layer
        return base.combine_ranks(self.with_lora(base.multiply_shard, x))


class ColumnParallelLinearWithShardedLoRA(ColumnShardedLoRA, ColumnParallelLinearWithLoRA):
    """The same with A's rows split over the ranks."""
