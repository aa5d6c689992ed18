"""The query, key and value projections of an attention layer, in one layer.

What it is: the wrappers of `QKVParallelLinear`. What it is not: a wrapper of projections that a
checkpoint stores fused; on one rank those are plain linear layers with one slice. Key and value
heads that are fewer than ranks are replicated: then several ranks have the same rows of k and v.
One rule: a slice a projection where the adapter has three pairs, one slice where it has one.
"""

from itertools import accumulate

from torch import nn

from engine.layers.base import SliceShape
from engine.layers.fully_sharded import ColumnShardedLoRA
from engine.layers.merged import PackedLinearWithLoRA
from engine.layers.packed import QKVParallelLinear
from engine.layout import Shard


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
        """One slice over all of q, k and v; each is split over the ranks by itself."""
        base = self.base_layer
        widths = [share.whole_width for share in base.shares]
        if base.group.is_single:
            return (SliceShape(base.in_features, sum(widths)),)
        firsts = accumulate(widths, initial=0)
        rows = tuple(
            range(first + part.start, first + part.stop)
            for first, share in zip(firsts, base.shares, strict=False)
            for part in share.rows or (range(share.whole_width),)
        )
        return (SliceShape(base.in_features, sum(widths), shard=Shard(b_rows=rows)),)


class MergedQKVParallelLinearWithShardedLoRA(ColumnShardedLoRA, MergedQKVParallelLinearWithLoRA):
    """Three slices, with A's rows dealt out."""


class QKVParallelLinearWithShardedLoRA(ColumnShardedLoRA, QKVParallelLinearWithLoRA):
    """One slice, with A's rows dealt out."""
