"""Experts' deltas on a GPU; the contracts are those of `engine.kernels.experts` and its halves.

What it is: one launch over (tile of pairs, part of the input, slice) for A, one that sums the parts
where ranks exchange what was shrunk, and one over (tile, block of outputs) for each slice's B. What
it is not: a reader of the host; who is routed where, and which slots have weights, is met on the
device. One rule: a tile is pairs of one slot and expert, and each of its rows is written by one
program a block, so nothing is atomic.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.gpu.common import (
    add_to_output,
    behind_a,
    find_split,
    find_weights,
    shrink_block,
    sum_parts,
)
from engine.kernels.gpu.expand import expand_block
from engine.kernels.gpu.launch import Layer, expand_constants, shrink_constants, sum_constants
from engine.kernels.gpu.tile_configs import ExpandPlan, ShrinkPlan


@triton.jit
def find_group(keys, first, experts):
    """(slot, expert) of the tile that starts at place `first`."""
    key = tl.load(keys + first)
    return key // experts, key % experts


@triton.jit
def find_places(keys, first, pair_count, BLOCK_M: tl.constexpr):
    """(places of a tile, which of them are its own)."""
    m = first + tl.arange(0, BLOCK_M)
    return m, tl.load(keys + m, m < pair_count, -1) == tl.load(keys + first)


@triton.jit
def experts_shrink_kernel(
    parts, x, data, offsets, ranks, layer, firsts, keys, pairs,
    split_stride, slice_stride, part_stride, x_stride, directory_stride,
    in_features, experts, pair_count,
    UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`parts[split, s, place, :rank]` of one tile, from this split's inputs."""
    first = tl.load(firsts + tl.program_id(0))
    if first >= pair_count:
        return
    split, place = tl.program_id(1), tl.program_id(2)
    slot, expert = find_group(keys, first, experts)
    offset, rank = find_weights(offsets, ranks, layer, slot, place, directory_stride, UNIT)
    if offset < 0:
        return
    m, is_own = find_places(keys, first, pair_count, BLOCK_M)
    row = tl.load(pairs + m, is_own, 0)
    k_first, k_end = find_split(in_features, split, SPLITS, BLOCK_K)
    a = data + offset + expert * rank * in_features
    part_rows = parts + split.to(tl.int64) * split_stride + place.to(tl.int64) * slice_stride
    part_rows += m * part_stride
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        acc = shrink_block(
            x + row * x_stride, a, is_own, r, rank, k_first, k_end, in_features,
            BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        tl.store(part_rows[:, None] + r[None, :], acc, is_own[:, None] & (r < rank)[None, :])


@triton.jit
def experts_sum_kernel(
    y, parts, offsets, ranks, layer, firsts, keys,
    split_stride, slice_stride, part_stride, y_slice_stride, y_stride, directory_stride,
    experts, pair_count,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`y[s, place, :rank]` of one tile: the sum of its parts, in their order."""
    first = tl.load(firsts + tl.program_id(0))
    if first >= pair_count:
        return
    place = tl.program_id(1)
    slot, _expert = find_group(keys, first, experts)
    offset, rank = find_weights(offsets, ranks, layer, slot, place, directory_stride, UNIT)
    if offset < 0:
        return
    m, is_own = find_places(keys, first, pair_count, BLOCK_M)
    part_rows = parts + place.to(tl.int64) * slice_stride + m * part_stride
    y_rows = y + place.to(tl.int64) * y_slice_stride + m * y_stride
    sum_parts(y_rows, part_rows, is_own, rank, split_stride, SPLITS, BLOCK_R)


@triton.jit
def experts_expand_kernel(
    y, parts, data, offsets, ranks, layer, firsts, keys, pairs,
    split_stride, part_stride, y_stride, directory_stride, in_features, experts, pair_count,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, COLUMN_STEP: tl.constexpr, OUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`y[row, n * COLUMN_STEP]` of one tile and one block of a slice's outputs `n`.

    `layer` and `parts` are the slice's own. Output `n` lies COLUMN_STEP columns behind the last.
    """
    first = tl.load(firsts + tl.program_id(0))
    if first >= pair_count:
        return
    slot, expert = find_group(keys, first, experts)
    offset, rank = find_weights(offsets, ranks, layer, slot, 0, directory_stride, UNIT)
    if offset < 0:
        return
    m, is_own = find_places(keys, first, pair_count, BLOCK_M)
    row = tl.load(pairs + m, is_own, 0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.multiple_of(tl.load(layer + 2), OUT_UNIT)
    b = data + behind_a(offset, rank * experts, in_features, UNIT)
    part_rows = parts + m * part_stride
    if rank % 8 == 0:
        # The compiler sees that this is a multiple of eight, so B's rows start at 16 bytes.
        whole = rank // 8 * 8
        acc = expand_block(
            part_rows, b + expert * width * whole, is_own, n, whole, width, split_stride,
            SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    else:
        acc = expand_block(
            part_rows, b + expert * width * rank, is_own, n, rank, width, split_stride,
            SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    mask = is_own[:, None] & (n < width)[None, :]
    add_to_output(y + row * y_stride, n * COLUMN_STEP, acc, mask, True)


def launch_experts_shrink(
    parts: Tensor, x: Tensor, layer: Layer, groups: ExpertGroups, plan: ShrinkPlan
) -> None:
    """Fill `parts` [splits, slices, pairs, rank_max] float32 in the groups' order."""
    firsts = groups.tiles(plan.height)
    experts_shrink_kernel[len(firsts), plan.splits, layer.slices](
        *(parts, x, *layer.operands, firsts, groups.keys, groups.pairs),
        *(*parts.stride()[:3], x.stride(0), layer.directory_stride),
        *(layer.in_features, groups.experts, len(groups.pairs)),
        **shrink_constants(plan, x, layer),
    )


def launch_experts_sum(
    y: Tensor, parts: Tensor, layer: Layer, groups: ExpertGroups, plan: ShrinkPlan
) -> None:
    """Sum what `launch_experts_shrink` left in `parts` into `y` [slices, pairs, rank_max]."""
    firsts = groups.tiles(plan.height)
    experts_sum_kernel[len(firsts), layer.slices](
        *(y, parts, *layer.operands[1:], firsts, groups.keys),
        *(*parts.stride()[:3], *y.stride()[:2], layer.directory_stride),
        *(groups.experts, len(groups.pairs)),
        **sum_constants(plan, layer),
    )


def launch_experts_expand(
    ys: Sequence[Tensor], parts: Tensor, layer: Layer, groups: ExpertGroups, plan: ExpandPlan
) -> None:
    """Add B's product with the sum of `parts` to each slice's `ys[s]` [pairs, out_features[s]]."""
    data, offsets, ranks, table = layer.operands
    firsts = groups.tiles(plan.height)
    for place, (y, width) in enumerate(zip(ys, layer.out_features, strict=True)):
        experts_expand_kernel[len(firsts), triton.cdiv(width, plan.block_n)](
            *(y, parts[:, place], data, offsets, ranks, table[place]),
            *(firsts, groups.keys, groups.pairs, parts.stride(0), parts.stride(2), y.stride(0)),
            *(layer.directory_stride, layer.in_features, groups.experts, len(groups.pairs)),
            COLUMN_STEP=y.stride(1),
            **expand_constants(plan, parts, layer),
        )
