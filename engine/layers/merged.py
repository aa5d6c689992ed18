"""Wrappers of packed projections other than q, k and v."""

from itertools import accumulate

import torch
from torch import Tensor, nn

from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape, SliceTensors, slice_tensors
from loradock.engine.layers.fully_sharded import ColumnShardedLoRA
from loradock.engine.layers.packed import MergedColumnParallelLinear, PackedLinear
from loradock.engine.parallel import ParallelGroup

GATE_AND_UP = 2


class PackedLinearWithLoRA(BaseLayerWithLoRA):
    """Base class of wrappers of packed layers: one base GEMM, one product over all slices."""

    base_layer: PackedLinear

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

        They share A, and B is split by their widths. Raises ValueError where the end of a B is not
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
        return self.with_lora(self.plain_product, x)

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


def _covered_widths(widths: list[int], rows: int) -> list[int]:
    """Return the widths of the first slices, whose sum is `rows`."""
    ends = list(accumulate(widths))
    if rows not in ends:
        raise ValueError(f"B has {rows} rows; slices of {widths} end after {ends}")
    return widths[: ends.index(rows) + 1]
