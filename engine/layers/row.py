"""A linear layer whose inputs are split over the ranks.

What it is: the wrappers of `RowParallelLinear`. What it is not: a second sum; the deltas take part
in the base layer's own. One rule: each rank adds what its own inputs give, and nothing twice.
"""

from torch import Tensor, nn

from engine.layers.base import BaseLayerWithLoRA, SliceShape
from engine.layers.fully_sharded import RowShardedLoRA
from engine.layers.tensor_parallel import RowParallelLinear
from engine.layout import Shard
from engine.parallel import ParallelGroup


class RowParallelLinearWithLoRA(BaseLayerWithLoRA):
    """One slice: A's columns as the inputs are split, B whole."""

    base_layer: RowParallelLinear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every layer whose inputs are split."""
        return isinstance(layer, RowParallelLinear)

    @property
    def group(self) -> ParallelGroup:
        """The ranks that share the layer."""
        return self.base_layer.group

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over the whole layer."""
        base = self.base_layer
        shard = Shard(a_columns=base.columns)
        return (SliceShape(base.whole_in_features, base.out_features, shard=shard),)

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the ranks of `x @ W.T + delta`, and the bias once."""
        base = self.base_layer
        x = base.enter(x)
        return base.complete(self.with_lora(base.partial, x))


class RowParallelLinearWithShardedLoRA(RowShardedLoRA, RowParallelLinearWithLoRA):
    """The same with B's rows split too."""
