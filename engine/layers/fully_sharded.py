"""Fully sharded LoRA: the matrix that is replicated by default is split over the ranks too.

This is the scheme of S-LoRA, as two mix-ins of linear wrappers, with functions that the experts'
wrappers share. Ranks exchange only shrunk activations, which have an adapter's rank of columns
instead of a layer's outputs, in float32.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from loradock.engine.kernels.operands import LoRASlices
from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape, slices_of
from loradock.engine.layers.tensor_parallel import RowParallelLinear
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica.wrapper import ShrinkExpand
from loradock.engine.residency.arena import Arena


def with_striped_a(shape: SliceShape, group: ParallelGroup) -> SliceShape:
    """Return the slice with A's rows distributed round-robin over the ranks."""
    shard = replace(shape.shard, rank_parts=group.world_size, rank_part=group.rank)
    return shape._replace(shard=shard)


def striped_shrink_expand(slices: LoRASlices, group: ParallelGroup) -> ShrinkExpand:
    """Return A and B of slices with a striped A, whose columns of the directory are A's."""
    parts = group.world_size
    if parts == 1:
        return ShrinkExpand(slices, slices)
    # A and B have separate columns: an A without outputs, and in the next one a B without inputs.
    kind, no_outputs = (slices.kind, slices.experts), (0,) * len(slices.columns)
    b_columns = tuple(column + 1 for column in slices.columns)
    shrink = LoRASlices(slices.directory, slices.columns, slices.in_features, no_outputs, *kind)
    expand = LoRASlices(slices.directory, b_columns, 0, slices.out_features, *kind)
    shrink.row_order = expand.row_order = slices.row_order
    return ShrinkExpand(shrink, expand, parts)


def gather_striped(group: ParallelGroup, shrunk: Tensor) -> Tensor:
    """Gather all ranks' columns: rank 0's first, rank 1's first, ..., rank 0's second, as A's rows.

    shrunk: [slices, rows, n] to [slices, rows, world_size * n].
    """
    return group.all_gather(shrunk).movedim(0, -1).flatten(-2)


class ShardedLoRA(BaseLayerWithLoRA):
    """A layer whose shrunk activations are exchanged between ranks before they are expanded."""

    _shrink_expand: ShrinkExpand | None = None

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """None: a rank has a part of the base output only."""
        return ()

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Combine the ranks' shrunk activations: [slices, tokens, n] to [..., rank_max]."""
        raise NotImplementedError(f"{type(self).__name__} must implement exchange")

    def rank_columns(self, rows: Tensor) -> Tensor:
        """Return the columns to which this rank adds; rows: [rows, out], the layer's output."""
        return rows

    def _shrink_expand_of(self, slices: LoRASlices) -> ShrinkExpand:
        raise NotImplementedError(f"{type(self).__name__} must implement _shrink_expand_of")

    def _bind(self, arena: Arena) -> None:
        slices = slices_of(arena, self.slice_shapes, self._columns)
        slices.row_order = self.row_order
        self._shrink_expand = self._shrink_expand_of(slices)

    def with_lora(self, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute `base(x)` first: the exchange leaves nothing to run concurrently."""
        return self.add_lora(self.own_output(base(x), x), x)

    def add_lora(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the batch's deltas to `y` in place, with an exchange between shrink and expand."""
        if self._punica is not None and self._shrink_expand is not None:
            rows = self.rank_columns(y.view(-1, y.shape[-1]))
            self._punica.add_lora_shrink_expand(rows, x, self._shrink_expand, self.exchange)
        return y


class ColumnShardedLoRA(ShardedLoRA):
    """A's rows striped, B's rows as the outputs: shrunk activations are gathered over the rank."""

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The base class's slices with a striped A."""
        return tuple(with_striped_a(shape, self.group) for shape in super().slice_shapes)

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Gather in the order of A's rows."""
        return gather_striped(self.group, shrunk)

    def _shrink_expand_of(self, slices: LoRASlices) -> ShrinkExpand:
        return striped_shrink_expand(slices, self.group)


class RowShardedLoRA(ShardedLoRA):
    """A's columns as the inputs, B's rows split: shrunk activations are summed over the ranks.

    Each rank writes its own columns of the delta, before the layer's own sum.
    """

    base_layer: RowParallelLinear

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The base class's slice with B's rows split too."""
        rows = self._rows
        return tuple(
            shape._replace(shard=replace(shape.shard, b_rows=(rows,)))
            for shape in super().slice_shapes
        )

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Sum every rank's products."""
        return self.group.all_reduce(shrunk)

    def rank_columns(self, rows: Tensor) -> Tensor:
        """Return the columns of this rank's rows of B."""
        return rows[:, self._rows.start : self._rows.stop]

    @property
    def _rows(self) -> range:
        return self.group.shard_range(self.base_layer.out_features, "out_features")

    def _shrink_expand_of(self, slices: LoRASlices) -> ShrinkExpand:
        return ShrinkExpand(slices, slices)
