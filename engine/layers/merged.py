"""Projections that read the same input, packed into one layer with a slice for each.

What it is: the wrappers of `MergedColumnParallelLinear`. What it is not: q, k and v, which have a
file of their own because key and value heads are replicated. One rule: however many tensors an
adapter brings, each slice ends with its own A and B, or with none.
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from engine.layers.base import BaseLayerWithLoRA, Parts, SliceShape
from engine.layers.fully_sharded import ColumnShardedLoRA
from engine.layers.packed import MergedColumnParallelLinear, PackedLinear
from engine.parallel import ParallelGroup

GATE_AND_UP = 2


class PackedLinearWithLoRA(BaseLayerWithLoRA):
    """What all wrappers of packed layers share: one base GEMM, one product over all slices."""

    base_layer: PackedLinear

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice a child, called as the child is."""
        base = self.base_layer
        return tuple(
            SliceShape(base.in_features, share.whole_width, name, shard=share.shard)
            for name, share in zip(base.child_names, base.shares, strict=True)
        )

    @property
    def group(self) -> ParallelGroup:
        """The ranks among which the outputs are split."""
        return self.base_layer.group

    def forward(self, x: Tensor) -> Tensor:
        """All children's outputs side by side, deltas included; x: [..., in_features]."""
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
    """The same with A's rows dealt out."""


class MergedColumnParallelLinearVariableSliceWithLoRA(PackedLinearWithLoRA):
    """Any number of outputs, or fewer adapter tensors than outputs.

    A tensor may cover several slices that lie side by side: its A is shared by all of them, and
    its B is cut by their widths.
    """

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Every packed layer of this kind."""
        return isinstance(layer, MergedColumnParallelLinear)

    def set_lora(self, slot: int, lora_a: Tensor | Parts, lora_b: Tensor | Parts) -> None:
        """As the base class; with fewer tensors than slices each covers those that B is wide.

        Raises ValueError where the Bs' rows do not end where slices end.
        """
        all_a: Parts = [lora_a] if isinstance(lora_a, Tensor) else lora_a
        all_b: Parts = [lora_b] if isinstance(lora_b, Tensor) else lora_b
        if len(all_a) == len(all_b) < len(self.base_layer.widths):
            all_a, all_b = self._spread(all_a, all_b)
        super().set_lora(slot, all_a, all_b)

    def _spread(self, all_a: Parts, all_b: Parts) -> tuple[Parts, Parts]:
        """One A and one B a slice, from tensors that cover several."""
        widths = [share.whole_width for share in self.base_layer.shares]
        a_of_slice: list[Tensor | None] = []
        b_of_slice: list[Tensor | None] = []
        for a, b in zip(all_a, all_b, strict=True):
            if a is None or b is None:
                raise ValueError("a tensor that covers several slices is missing; give A and B")
            covered = _covered(widths[len(b_of_slice) :], len(b))
            a_of_slice += [a] * len(covered)
            b_of_slice += torch.split(b, covered)
        if len(b_of_slice) != len(widths):
            raise ValueError(f"B's rows cover {len(b_of_slice)} slices; there are {len(widths)}")
        return a_of_slice, b_of_slice


def _covered(widths: list[int], rows: int) -> list[int]:
    """The widths of the first slices whose sum is `rows`."""
    ends = list(accumulate(widths))
    if rows not in ends:
        raise ValueError(f"B has {rows} rows; slices of {widths} end after {ends}")
    return widths[: ends.index(rows) + 1]
