"""What the strategies need to know of one layer for one block of rows.

What it is: the matrices of a block's parts, slice by slice. What it is not: a product. One rule: a
slice for which no part has weights is left out.
"""

from itertools import accumulate
from typing import Final, NamedTuple

import torch

from engine.kernels.cpu.blocks import Block
from engine.kernels.operands import LoRASlices, Pair, accumulator_dtype

NARROW_RANK: Final = 16
NARROW_ROWS: Final = 32
"""Up to this rank, and from so many rows on, A stands on the left in bfloat16."""


class SliceWeights(NamedTuple):
    """One slice: its first column in the layer's output, and the pair of each of a block's parts.

    `in_features` and `out_features` are its widths.
    """

    first: int
    in_features: int
    out_features: int
    pairs: tuple[Pair | None, ...]

    @property
    def columns(self) -> slice:
        """Its columns of the layer's output."""
        return slice(self.first, self.first + self.out_features)

    @property
    def ranks(self) -> list[int]:
        """The rank of each part; 0 where it has nothing."""
        return [pair.b.shape[1] if pair else 0 for pair in self.pairs]


class LayerBlock(NamedTuple):
    """One layer's slices for one block; `activations` and `weights` are the dtypes of x and A."""

    block: Block
    slices: tuple[SliceWeights, ...]
    activations: torch.dtype
    weights: torch.dtype

    @property
    def in_features(self) -> int:
        """The width of x."""
        return self.slices[0].in_features

    @property
    def signature(self) -> tuple[object, ...]:
        """What costs depend on: equal for layers that are alike."""
        widths = [(one.in_features, one.out_features, *one.ranks) for one in self.slices]
        return (self.block, self.activations, self.weights, *widths)


def layer_block(weights: LoRASlices, block: Block, activations: torch.dtype) -> LayerBlock | None:
    """The layer's slices that any of the block's parts touches; None where there is none."""
    by_part = [weights.pairs(part.slot) for part in block.parts]
    firsts = accumulate(weights.out_features, initial=0)
    slices = tuple(
        SliceWeights(first, weights.in_features, out_features, pairs)
        for first, out_features, pairs in zip(
            firsts, weights.out_features, zip(*by_part, strict=True), strict=False
        )
        if any(pairs)
    )
    if not slices:
        return None
    return LayerBlock(block, slices, activations, weights.directory.data.dtype)


def wide_dtype(activations: torch.dtype, weights: torch.dtype) -> torch.dtype:
    """The dtype in which nothing between the operands and the result is rounded more than once."""
    return accumulator_dtype(torch.promote_types(activations, weights))


def computation_dtypes(activations: torch.dtype, weights: torch.dtype) -> list[torch.dtype]:
    """What products may be made in; the first is the nearest to the operands' own.

    float16 has no fast product on CPUs, so it is computed in float32, as is what mixes dtypes.
    """
    wide = wide_dtype(activations, weights)
    is_native = activations == weights and weights in (wide, torch.bfloat16)
    return [weights, wide] if is_native and weights != wide else [wide]


def is_turned(computed: torch.dtype, rank: int, rows: int) -> bool:
    """Whether the first product is made as `A @ x.T`, so that its result comes out turned.

    The library packs the right operand of a bfloat16 product into wide blocks, which a narrow A
    fills badly. With x there instead, a long run's delta took 0.86 of the time at rank 16.
    """
    return computed == torch.bfloat16 and rank <= NARROW_RANK and rows >= NARROW_ROWS
