"""Wrappers of the query, key and value projections of an attention layer, packed in one layer.

There is one slice per projection where an adapter has three pairs, and one slice where it has one.
Projections that a checkpoint stores fused are plain linear layers with one slice on one rank. Where
there are fewer key and value heads than ranks, several ranks have the same rows of k and v.
"""

from itertools import accumulate

from torch import nn

from loradock.engine.layers.base import SliceShape
from loradock.engine.layers.fully_sharded import ColumnShardedLoRA
from loradock.engine.layers.merged import PackedLinearWithLoRA
from loradock.engine.layers.packed import QKVParallelLinear
from loradock.engine.layout import Shard


class MergedQKVParallelLinearWithLoRA(PackedLinearWithLoRA):
    """q, k and v with an A and a B each: three slices."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Three projections that the model names separately."""
        return isinstance(layer, QKVParallelLinear) and len(layer.child_names) == len(layer.widths)


class QKVParallelLinearWithLoRA(PackedLinearWithLoRA):
    """q, k and v that the model names as one layer: one A and one B over all three."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Three projections under one name."""
        return isinstance(layer, QKVParallelLinear) and not layer.child_names

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over all of q, k and v, each of which is split over the ranks separately."""
        base = self.base_layer
        widths = [share.whole_width for share in base.shares]
        if base.group.is_trivial:
            return (SliceShape(base.in_features, sum(widths)),)
        firsts = accumulate(widths, initial=0)
        rows = tuple(
            range(first + part.start, first + part.stop)
            for first, share in zip(firsts, base.shares, strict=False)
            for part in share.rows or (range(share.whole_width),)
        )
        return (SliceShape(base.in_features, sum(widths), shard=Shard(b_rows=rows)),)


class MergedQKVParallelLinearWithShardedLoRA(ColumnShardedLoRA, MergedQKVParallelLinearWithLoRA):
    """Three slices, with A's rows split over the ranks."""


class QKVParallelLinearWithShardedLoRA(ColumnShardedLoRA, QKVParallelLinearWithLoRA):
    """One slice, with A's rows split over the ranks."""
