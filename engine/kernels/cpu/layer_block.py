"""One layer's weights for one block of rows: the input of the CPU strategies."""

from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from loradock.engine.kernels.cpu.blocks import Block
from loradock.engine.kernels.operands import LoRAPair, LoRASlices, accumulator_dtype

NARROW_RANK_MAX: Final = 16
NARROW_ROWS_MIN: Final = 32
"""Limits within which bfloat16 products are computed as `A @ x.T`: rank at most, rows at least."""


class EqualDistance(NamedTuple):
    """Parts `first` to `first + parts` of a slice, whose weights are `distance` elements apart."""

    first: int
    parts: int
    distance: int


class SliceWeights(NamedTuple):
    """One slice: its first column of the output, its shape, and the pair of each block part."""

    offset: int
    in_features: int
    out_features: int
    pairs: tuple[LoRAPair | None, ...]

    @property
    def columns(self) -> slice:
        """The slice's columns of the layer's output."""
        return slice(self.offset, self.offset + self.out_features)

    @property
    def features(self) -> tuple[int, int]:
        """The slice's inputs and outputs."""
        return self.in_features, self.out_features

    @property
    def ranks(self) -> list[int]:
        """The rank of each part; 0 where it has no weights."""
        return [pair.b.shape[1] if pair else 0 for pair in self.pairs]

    @property
    def elements(self) -> int:
        """The elements of all parts' A and B."""
        return sum(self.ranks) * sum(self.features)

    @property
    def present(self) -> list[LoRAPair]:
        """The pairs of the parts that have weights."""
        return [pair for pair in self.pairs if pair is not None]

    @property
    def strided_runs(self) -> tuple[EqualDistance, ...]:
        """The parts divided into runs, each of which is one tensor with a stride over the arena.

        For slices with the same rank in all parts.
        """
        starts = [int(pair.a.storage_offset()) for pair in self.present]
        runs, first = [], 0
        while first < len(starts):
            end = first + 1
            distance = starts[end] - starts[first] if end < len(starts) else 0
            while distance > 0 and end < len(starts) and starts[end] - starts[end - 1] == distance:
                end += 1
            runs.append(EqualDistance(first, end - first, distance if end - first > 1 else 0))
            first = end
        return tuple(runs)


class LayerBlock(NamedTuple):
    """One layer's slices for one block; slices without weights in all parts are left out."""

    block: Block
    slices: tuple[SliceWeights, ...]
    activation_dtype: torch.dtype
    weight_dtype: torch.dtype

    @property
    def in_features(self) -> int:
        """The columns of x."""
        return self.slices[0].in_features

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights."""
        return self.weight_dtype.itemsize * sum(weights.elements for weights in self.slices)

    def is_in_place(self, dtype: torch.dtype) -> bool:
        """Whether rows of x and y are used where they are by a computation in `dtype`."""
        return self.block.rows is None and self.activation_dtype == dtype == self.weight_dtype

    @property
    def signature(self) -> tuple[object, ...]:
        """Everything that costs depend on; equal for layers whose costs are equal."""
        shapes = [
            (*weights.features, *weights.ranks, len(weights.strided_runs))
            for weights in self.slices
        ]
        return (self.block, self.activation_dtype, self.weight_dtype, *shapes)


def layer_block(
    slices: LoRASlices, block: Block, activation_dtype: torch.dtype
) -> LayerBlock | None:
    """Return the layer's slices with weights in any of the block's parts; None without any."""
    pairs_by_part = [slices.pairs(part.slot) for part in block.parts]
    offsets = accumulate(slices.out_features, initial=0)
    present = tuple(
        SliceWeights(offset, slices.in_features, out_features, pairs)
        for offset, out_features, pairs in zip(
            offsets, slices.out_features, zip(*pairs_by_part, strict=True), strict=False
        )
        if any(pairs)
    )
    if not present:
        return None
    return LayerBlock(block, present, activation_dtype, slices.directory.data.dtype)


def wide_dtype(activation_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which intermediate results are rounded only once."""
    return accumulator_dtype(torch.promote_types(activation_dtype, weight_dtype))


def computation_dtypes(
    activation_dtype: torch.dtype, weight_dtype: torch.dtype
) -> list[torch.dtype]:
    """Return the dtypes in which products may be computed; the first is closest to the operands'.

    float16 is computed in float32 because CPUs have no fast float16 product, and so are mixed
    dtypes.
    """
    wide = wide_dtype(activation_dtype, weight_dtype)
    is_native = activation_dtype == weight_dtype and weight_dtype in (wide, torch.bfloat16)
    return [weight_dtype, wide] if is_native and weight_dtype != wide else [wide]


def computes_transposed(dtype: torch.dtype, rank: int, rows: int) -> bool:
    """Whether the first product is computed as `A @ x.T`, with a transposed result.

    The library packs the right operand of a bfloat16 product into wide blocks, which a narrow A
    fills badly. With x as the right operand, a long run's delta took 0.86 of the time at rank 16,
    but 1.2 to 1.4 times as long on a processor whose tiles multiply bfloat16.
    """
    is_narrow = rank <= NARROW_RANK_MAX and rows >= NARROW_ROWS_MIN
    return dtype == torch.bfloat16 and is_narrow and not has_bfloat16_tiles()


@cache
def has_bfloat16_tiles() -> bool:
    """Whether this processor multiplies bfloat16 by tiles (AMX)."""
    # PyTorch 2.11 may lack it.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("amx_bf16", False)
