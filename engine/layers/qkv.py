"""The query, key and value projections of an attention layer, in one layer.

What it is: the wrappers of `QKVParallelLinear`. What it is not: a wrapper of projections that a
checkpoint stores fused; on one rank those are plain linear layers with one slice. One rule: a
slice a projection where the adapter has three pairs, one slice where it has one.
"""

from torch import nn

from engine.layers.base import SliceShape
from engine.layers.merged import PackedLinearWithLoRA
from engine.layers.packed import QKVParallelLinear


class MergedQKVParallelLinearWithLoRA(PackedLinearWithLoRA):
    """q, k and v with an A and a B each: three slices."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Three projections that the model knows one by one."""
        return isinstance(layer, QKVParallelLinear) and len(layer.child_names) == len(layer.widths)


class QKVParallelLinearWithLoRA(PackedLinearWithLoRA):
    """q, k and v that the model knows as one layer: one A and one B over all three."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Three projections under one name."""
        return isinstance(layer, QKVParallelLinear) and not layer.child_names

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over all of q, k and v."""
        return (SliceShape(self.base_layer.in_features, self.base_layer.out_features),)
