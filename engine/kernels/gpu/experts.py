"""The operations on experts on a GPU, specified by their references.

Shrink is one launch over (tile of pairs, split of the input, slice), and one that sums the splits
where ranks exchange the result. Expand is one launch per slice over (tile, block of outputs).

Routing, and which slots have weights, is read on the device only. A tile contains pairs of one slot
and expert, and each of its rows is written by one program per block, without atomics.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.gpu.common import (
    add_to_output,
    b_offset,
    find_split,
    find_weights,
    shrink_block,
    sum_parts,
)
from loradock.engine.kernels.gpu.launch import (
    LayerOperands,
    expand_constants,
    shrink_constants,
    sum_constants,
)
from loradock.engine.kernels.gpu.shrink_expand import expand_block
from loradock.engine.kernels.gpu.tile_configs import ExpandConfig, ShrinkConfig


@triton.jit
def find_group(keys, first, experts):
    """Return (slot, expert) of the tile that starts at index `first`."""
    key = tl.load(keys + first)
    return key // experts, key % experts


@triton.jit
def find_tile_pairs(keys, first, pair_count, BLOCK_M: tl.constexpr):
    """Return (indices of BLOCK_M pairs from `first` on, whether each is in the tile)."""
    m = first + tl.arange(0, BLOCK_M)
    return m, tl.load(keys + m, m < pair_count, -1) == tl.load(keys + first)


@triton.jit
def experts_shrink_kernel(
    parts, x, data, offsets, ranks, slice_table, tile_starts, keys, pairs,
    split_stride, slice_stride, part_stride, x_stride, directory_stride,
    in_features, experts, pair_count,
    UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute `parts[split, s, m, :rank]` of one tile, from this split's inputs."""
    first = tl.load(tile_starts + tl.program_id(0))
    if first >= pair_count:
        return
    split, index = tl.program_id(1), tl.program_id(2)
    slot, expert = find_group(keys, first, experts)
    offset, rank = find_weights(offsets, ranks, slice_table, slot, index, directory_stride, UNIT)
    if offset < 0:
        return
    m, is_in_tile = find_tile_pairs(keys, first, pair_count, BLOCK_M)
    row = tl.load(pairs + m, is_in_tile, 0)
    k_first, k_end = find_split(in_features, split, SPLITS, BLOCK_K)
    a = data + offset + expert * rank * in_features
    part_rows = parts + split.to(tl.int64) * split_stride + index.to(tl.int64) * slice_stride
    part_rows += m * part_stride
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        acc = shrink_block(
            x + row * x_stride, a, is_in_tile, r, rank, k_first, k_end, in_features,
            BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        tl.store(part_rows[:, None] + r[None, :], acc, is_in_tile[:, None] & (r < rank)[None, :])


@triton.jit
def experts_sum_kernel(
    y, parts, offsets, ranks, slice_table, tile_starts, keys,
    split_stride, slice_stride, part_stride, y_slice_stride, y_stride, directory_stride,
    experts, pair_count,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute `y[s, m, :rank]` of one tile: the sum of its partial sums, in the order of splits."""
    first = tl.load(tile_starts + tl.program_id(0))
    if first >= pair_count:
        return
    index = tl.program_id(1)
    slot, _expert = find_group(keys, first, experts)
    offset, rank = find_weights(offsets, ranks, slice_table, slot, index, directory_stride, UNIT)
    if offset < 0:
        return
    m, is_in_tile = find_tile_pairs(keys, first, pair_count, BLOCK_M)
    part_rows = parts + index.to(tl.int64) * slice_stride + m * part_stride
    y_rows = y + index.to(tl.int64) * y_slice_stride + m * y_stride
    sum_parts(y_rows, part_rows, is_in_tile, rank, split_stride, SPLITS, BLOCK_R)


@triton.jit
def experts_expand_kernel(
    y, parts, data, offsets, ranks, slice_table, tile_starts, keys, pairs,
    split_stride, part_stride, y_stride, directory_stride, in_features, experts, pair_count,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, COLUMN_STEP: tl.constexpr, OUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute `y[row, n * COLUMN_STEP]` of one tile and one block of a slice's outputs `n`.

    `slice_table` and `parts` are this slice's. Consecutive outputs are COLUMN_STEP columns apart.
    """
    first = tl.load(tile_starts + tl.program_id(0))
    if first >= pair_count:
        return
    slot, expert = find_group(keys, first, experts)
    offset, rank = find_weights(offsets, ranks, slice_table, slot, 0, directory_stride, UNIT)
    if offset < 0:
        return
    m, is_in_tile = find_tile_pairs(keys, first, pair_count, BLOCK_M)
    row = tl.load(pairs + m, is_in_tile, 0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_features = tl.multiple_of(tl.load(slice_table + 2), OUT_UNIT)
    b = data + b_offset(offset, rank * experts, in_features, UNIT)
    part_rows = parts + m * part_stride
    if rank % 8 == 0:
        # The compiler sees a multiple of 8 here, so B's rows start at multiples of 16 bytes.
        whole = rank // 8 * 8
        acc = expand_block(
            part_rows, b + expert * out_features * whole, is_in_tile, n, whole, out_features,
            split_stride, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    else:
        acc = expand_block(
            part_rows, b + expert * out_features * rank, is_in_tile, n, rank, out_features,
            split_stride, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    mask = is_in_tile[:, None] & (n < out_features)[None, :]
    add_to_output(y + row * y_stride, n * COLUMN_STEP, acc, mask)


def launch_experts_shrink(
    parts: Tensor, x: Tensor, operands: LayerOperands, groups: ExpertGroups, config: ShrinkConfig
) -> None:
    """Fill `parts` [splits, slices, pairs, rank_max] float32 in the groups' order."""
    tile_starts = groups.tile_starts(config.block_m)
    experts_shrink_kernel[len(tile_starts), config.splits, operands.slice_count](
        parts, x, *operands.tables, tile_starts, groups.keys, groups.pairs,
        *parts.stride()[:3], x.stride(0), operands.directory_stride,
        operands.in_features, groups.experts, len(groups.pairs),
        **shrink_constants(config, x, operands),
    )  # fmt: skip


def launch_experts_sum(
    y: Tensor, parts: Tensor, operands: LayerOperands, groups: ExpertGroups, config: ShrinkConfig
) -> None:
    """Sum the output `parts` of `launch_experts_shrink` into `y` [slices, pairs, rank_max]."""
    tile_starts = groups.tile_starts(config.block_m)
    experts_sum_kernel[len(tile_starts), operands.slice_count](
        y, parts, *operands.tables[1:], tile_starts, groups.keys,
        *parts.stride()[:3], *y.stride()[:2], operands.directory_stride,
        groups.experts, len(groups.pairs),
        **sum_constants(config, operands),
    )  # fmt: skip


def launch_experts_expand(
    ys: Sequence[Tensor],
    parts: Tensor,
    operands: LayerOperands,
    groups: ExpertGroups,
    config: ExpandConfig,
) -> None:
    """Add B's product with the sum of `parts` to each slice's `ys[s]` [pairs, out_features[s]]."""
    data, offsets, ranks, slice_table = operands.tables
    tile_starts = groups.tile_starts(config.block_m)
    for index, (y, out_features) in enumerate(zip(ys, operands.out_features, strict=True)):
        slice_parts = parts[:, index]
        experts_expand_kernel[len(tile_starts), triton.cdiv(out_features, config.block_n)](
            y, slice_parts, data, offsets, ranks, slice_table[index],
            tile_starts, groups.keys, groups.pairs,
            slice_parts.stride(0), slice_parts.stride(1), y.stride(0), operands.directory_stride,
            operands.in_features, groups.experts, len(groups.pairs),
            COLUMN_STEP=y.stride(1),
            **expand_constants(config, parts, operands),
        )  # fmt: skip
