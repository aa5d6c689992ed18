"""The first half of a LoRA product on a GPU; the contract is `engine.kernels.reference.shrink`'s.

What it is: one launch over (tile, part of the input, slice), and one that sums the parts. What it
is not: atomic; parts are summed in their order, so a batch has the same bits on every run. One
rule: a program reads as many rows of A as its slot's own rank.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.common import (
    find_split,
    find_tile,
    find_weights,
    shrink_block,
    sum_parts,
)
from engine.kernels.gpu.launch import Layer, shrink_constants, sum_constants, tiles_of
from engine.kernels.gpu.tile_configs import ShrinkPlan
from engine.kernels.operands import Groups


@triton.jit
def shrink_kernel(
    y, x, data, offsets, ranks, layer, tiles, rows,
    split_stride, slice_stride, y_stride, x_stride, directory_stride, in_features, scale,
    UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`y[split, s, t, :rank]` of one tile: the part of the sum that lies in this split's inputs."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    split, place = tl.program_id(1), tl.program_id(2)
    offset, rank = find_weights(offsets, ranks, layer, slot, place, directory_stride, UNIT)
    if offset < 0:
        return
    m = tl.arange(0, BLOCK_M)
    row = tl.load(rows + first + m, m < count, 0)
    k_first, k_end = find_split(in_features, split, SPLITS, BLOCK_K)
    y_rows = y + split.to(tl.int64) * split_stride + place.to(tl.int64) * slice_stride
    y_rows += row * y_stride
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        acc = shrink_block(
            x + row * x_stride, data + offset, m < count, r, rank, k_first, k_end, in_features,
            BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        mask = (m < count)[:, None] & (r < rank)[None, :]
        tl.store(y_rows[:, None] + r[None, :], acc * scale, mask)


@triton.jit
def sum_splits_kernel(
    y, parts, offsets, ranks, layer, tiles, rows,
    split_stride, slice_stride, part_stride, y_slice_stride, y_stride, directory_stride,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`y[s, t, :rank]` of one tile: the sum of its parts, in their order."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    place = tl.program_id(1)
    offset, rank = find_weights(offsets, ranks, layer, slot, place, directory_stride, UNIT)
    if offset < 0:
        return
    m = tl.arange(0, BLOCK_M)
    row = tl.load(rows + first + m, m < count, 0)
    part_rows = parts + place.to(tl.int64) * slice_stride + row * part_stride
    y_rows = y + place.to(tl.int64) * y_slice_stride + row * y_stride
    sum_parts(y_rows, part_rows, m < count, rank, split_stride, SPLITS, BLOCK_R)


def launch_shrink(
    parts: Tensor, x: Tensor, layer: Layer, groups: Groups, scale: float, plan: ShrinkPlan
) -> None:
    """Fill `parts` [splits, slices, tokens, rank_max] float32 with every split's part."""
    tiles = tiles_of(groups, plan.height)
    shrink_kernel[len(tiles), plan.splits, layer.slices](
        *(parts, x, *layer.operands, tiles, groups.rows),
        *(*parts.stride()[:3], x.stride(0), layer.directory_stride, layer.in_features, scale),
        **shrink_constants(plan, x, layer),
    )


def launch_sum_splits(
    y: Tensor, parts: Tensor, layer: Layer, groups: Groups, plan: ShrinkPlan
) -> None:
    """Sum what `launch_shrink` left in `parts` into `y` [slices, tokens, rank_max]."""
    tiles = tiles_of(groups, plan.height)
    sum_splits_kernel[len(tiles), layer.slices](
        *(y, parts, *layer.operands[1:], tiles, groups.rows),
        *(*parts.stride()[:3], *y.stride()[:2], layer.directory_stride),
        **sum_constants(plan, layer),
    )
