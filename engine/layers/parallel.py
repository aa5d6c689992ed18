"""Wrappers of linear layers that are split over ranks or packed, and of both fully sharded.

B is split as the base layer's outputs are, and A as its inputs, so a delta belongs to the columns
that it is added to. If the inputs are split, each rank adds the delta of its own inputs, and the
base layer's sum over the ranks includes it.

With fully sharded LoRA (the scheme of S-LoRA) the matrix that is replicated by default is split
over the ranks too. Ranks exchange only shrunk activations, which have an adapter's rank of columns
instead of a layer's outputs, in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.kernels.operands import LoRASlices
from loradock.engine.layers.base import (
    BaseLayerWithLoRA,
    SliceShape,
    SliceTensors,
    slice_tensors,
    slices_of,
)
from loradock.engine.layers.linear import BaseProduct
from loradock.engine.layers.packed import (
    MergedColumnParallelLinear,
    PackedLinear,
    QKVParallelLinear,
)
from loradock.engine.layers.saved import Step
from loradock.engine.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from loradock.engine.layout import Shard
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica.wrapper import PunicaWrapper, ShrinkExpand
from loradock.engine.residency.arena import Arena

GATE_AND_UP = 2


def with_sharded_rank(shape: SliceShape, group: ParallelGroup) -> SliceShape:
    """Return the slice with A's rows distributed round-robin over the ranks."""
    shard = replace(shape.shard, rank_parts=group.world_size, rank_part=group.rank)
    return shape._replace(shard=shard)


def sharded_shrink_expand(slices: LoRASlices, group: ParallelGroup) -> ShrinkExpand:
    """Return A and B of slices whose A is sharded by rank dimension.

    The directory columns of `slices` are A's.
    """
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


def gather_ranks(group: ParallelGroup, shrunk: Tensor) -> Tensor:
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
        return self.add_lora(base(x).contiguous(), x)

    def _delta_steps(self, y: Tensor, x: Tensor) -> Iterator[Step]:  # noqa: ARG002 - the base's
        """Yield the step with the exchange, whether or not a rank has anything to add."""
        if self._punica is not None and self._shrink_expand is not None:
            yield _ExchangedStep(self, self._punica, self._shrink_expand, x.shape[:-1])


class _ExchangedStep(NamedTuple):
    """Adds the batch's deltas to this rank's columns, with an exchange after shrink."""

    layer: ShardedLoRA
    punica: PunicaWrapper
    slices: ShrinkExpand
    shape: Sequence[int]

    def run(self, y: Tensor, x: Tensor) -> None:
        """Shrink, exchange and expand."""
        rows, exchange = self.layer.rank_columns(y), self.layer.exchange
        self.punica.add_lora_shrink_expand(rows, x.view(*self.shape, -1), self.slices, exchange)


class ColumnShardedLoRA(ShardedLoRA):
    """A sharded by rank dimension, B's rows as the outputs.

    Shrunk activations are gathered over the rank.
    """

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """The base class's slices with an A sharded by rank dimension."""
        return tuple(with_sharded_rank(shape, self.group) for shape in super().slice_shapes)

    def exchange(self, shrunk: Tensor) -> Tensor:
        """Gather in the order of A's rows."""
        return gather_ranks(self.group, shrunk)

    def _shrink_expand_of(self, slices: LoRASlices) -> ShrinkExpand:
        return sharded_shrink_expand(slices, self.group)


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


class PackedLinearWithLoRA(BaseLayerWithLoRA):
    """Base class of wrappers of packed layers: one base GEMM, one product over all slices."""

    base_layer: PackedLinear

    def __init__(self, base_layer: PackedLinear) -> None:
        super().__init__(base_layer)
        self._product = BaseProduct(base_layer)

    def pack_weights(self, is_shared: Callable[[Tensor], bool]) -> None:
        """Pack the weight of all children."""
        self._product.pack(is_shared)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice per child, with the child's name."""
        base = self.base_layer
        return tuple(
            SliceShape(base.in_features, share.whole_width, name, shard=share.shard)
            for name, share in zip(base.child_names, base.shares, strict=True)
        )

    @property
    def group(self) -> ParallelGroup:
        """The ranks over which the outputs are split."""
        return self.base_layer.group

    def set_lora(
        self, index: int, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> None:
        """As the base class; with fewer tensors than slices, `expand_packed_lora` spreads them."""
        all_a, all_b = slice_tensors(lora_a), slice_tensors(lora_b)
        if 0 < len(all_a) == len(all_b) < len(self.slice_shapes):
            all_a, all_b = self.expand_packed_lora(all_a, all_b)
        super().set_lora(index, all_a, all_b)

    def expand_packed_lora(
        self, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> tuple[SliceTensors, SliceTensors]:
        """Return one A and one B per slice, from tensors that cover several adjacent slices.

        They share A, and B is split by their widths. Raises ValueError if the end of a B is not
        the end of a slice.
        """
        widths = [shape.out_features for shape in self.slice_shapes]
        a_of_slice: list[Tensor | None] = []
        b_of_slice: list[Tensor | None] = []
        for a, b in zip(slice_tensors(lora_a), slice_tensors(lora_b), strict=True):
            if a is None or b is None:
                raise ValueError(
                    "A or B of a tensor that covers several slices is missing; pass both"
                )
            covered = _covered_widths(widths[len(b_of_slice) :], len(b))
            a_of_slice += [a] * len(covered)
            b_of_slice += torch.split(b, covered)
        if len(b_of_slice) != len(widths):
            raise ValueError(f"B's rows cover {len(b_of_slice)} slices; there are {len(widths)}")
        return a_of_slice, b_of_slice

    def forward(self, x: Tensor) -> Tensor:
        """Return all children's outputs, concatenated, with deltas; x: [..., in_features]."""
        return self.with_lora(self._product, x)

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """The same modules as can be replaced whole."""
        return self.saved_shapes

    def base_weights(self, index: int) -> tuple[Tensor, Tensor | None] | None:
        """Return a child's."""
        return self.base_layer.part_weight(index), self.base_layer.part_bias(index)

    @property
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """Every child, if this rank has all of their rows."""
        base = self.base_layer
        if not base.group.is_trivial or not base.child_names:
            return ()
        return tuple(
            SliceShape(base.in_features, width, name)
            for name, width in zip(base.child_names, base.widths, strict=True)
        )


class MergedColumnParallelLinearWithLoRA(PackedLinearWithLoRA):
    """Gate and up: two slices, two A, two B."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Two projections."""
        return isinstance(layer, MergedColumnParallelLinear) and len(layer.widths) == GATE_AND_UP


class MergedColumnParallelLinearWithShardedLoRA(
    ColumnShardedLoRA, MergedColumnParallelLinearWithLoRA
):
    """The same with A's rows split over the ranks."""


class MergedColumnParallelLinearVariableSliceWithLoRA(PackedLinearWithLoRA):
    """Any number of outputs."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every packed layer of this kind."""
        return isinstance(layer, MergedColumnParallelLinear)


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


def _covered_widths(widths: list[int], rows: int) -> list[int]:
    """Return the widths of the first slices, whose sum is `rows`."""
    ends = list(accumulate(widths))
    if rows not in ends:
        raise ValueError(f"B has {rows} rows; slices of {widths} end after {ends}")
    return widths[: ends.index(rows) + 1]
