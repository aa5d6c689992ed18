"""Wrappers of packed projections other than q, k and v."""

from itertools import accumulate

import torch
from torch import Tensor, nn

from engine.layers.base import BaseLayerWithLoRA, SliceShape, SliceTensors
from engine.layers.fully_sharded import ColumnShardedLoRA
from engine.layers.packed import MergedColumnParallelLinear, PackedLinear
from engine.parallel import ParallelGroup

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

    def forward(self, x: Tensor) -> Tensor:
        """Return all children's outputs, concatenated, with deltas; x: [..., in_features]."""
        return self.with_lora(self.base_layer, x)


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
    """Any number of outputs, or fewer adapter tensors than outputs.

    A tensor may cover several adjacent slices: they share its A, and its B is split by their sizes.
    """

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every packed layer of this kind."""
        return isinstance(layer, MergedColumnParallelLinear)

    def set_lora(
        self, slot: int, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> None:
        """As the base class; with fewer tensors than slices, each covers the slices its B spans.

        Raises ValueError where the end of a B is not the end of a slice.
        """
        all_a: SliceTensors = [lora_a] if isinstance(lora_a, Tensor) else lora_a
        all_b: SliceTensors = [lora_b] if isinstance(lora_b, Tensor) else lora_b
        if len(all_a) == len(all_b) < len(self.base_layer.widths):
            all_a, all_b = self._split_over_slices(all_a, all_b)
        super().set_lora(slot, all_a, all_b)

    def _split_over_slices(
        self, all_a: SliceTensors, all_b: SliceTensors
    ) -> tuple[SliceTensors, SliceTensors]:
        """Return one A and one B per slice, from tensors that cover several."""
        widths = [share.whole_width for share in self.base_layer.shares]
        a_of_slice: list[Tensor | None] = []
        b_of_slice: list[Tensor | None] = []
        for a, b in zip(all_a, all_b, strict=True):
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


def _covered_widths(widths: list[int], rows: int) -> list[int]:
    """Return the widths of the first slices, whose sum is `rows`."""
    ends = list(accumulate(widths))
    if rows not in ends:
        raise ValueError(f"B has {rows} rows; slices of {widths} end after {ends}")
    return widths[: ends.index(rows) + 1]
