"""The operations `shrink` and `expand` on a GPU, specified by their references.

Shrink is one launch over (tile, split of the input, slice) and one that sums the splits in their
order, without atomics, so a batch has the same bits in every run. A program reads only its slot's
own rank of A.

Expand is one launch over (tile, block of outputs) for all slices. Ranks that are a multiple of 8
are read in 128-bit loads, others in narrower ones. The intermediate stays float32, and the sum with
the base output is rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from loradock.engine.kernels.gpu.common import (
    add_to_output,
    b_offset,
    find_slice,
    find_split,
    find_tile,
    find_weights,
    load_b,
    load_parts,
    multiply_exactly,
    shrink_block,
    sum_parts,
)
from loradock.engine.kernels.gpu.launch import (
    LayerOperands,
    expand_constants,
    shrink_constants,
    sum_constants,
    tile_table,
)
from loradock.engine.kernels.gpu.tile_configs import ExpandConfig, ShrinkConfig
from loradock.engine.kernels.operands import Groups


@triton.jit
def shrink_kernel(
    y, x, data, offsets, ranks, slice_table, tiles, rows,
    split_stride, slice_stride, y_stride, x_stride, directory_stride, in_features,
    UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute `y[split, s, t, :rank]` of one tile: the partial sum over this split's inputs."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    split, index = tl.program_id(1), tl.program_id(2)
    offset, rank = find_weights(offsets, ranks, slice_table, slot, index, directory_stride, UNIT)
    if offset < 0:
        return
    m = tl.arange(0, BLOCK_M)
    row = tl.load(rows + first + m, m < count, 0)
    k_first, k_end = find_split(in_features, split, SPLITS, BLOCK_K)
    y_rows = y + split.to(tl.int64) * split_stride + index.to(tl.int64) * slice_stride
    y_rows += row * y_stride
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        acc = shrink_block(
            x + row * x_stride, data + offset, m < count, r, rank, k_first, k_end, in_features,
            BLOCK_M, BLOCK_R, BLOCK_K,
        )  # fmt: skip
        mask = (m < count)[:, None] & (r < rank)[None, :]
        tl.store(y_rows[:, None] + r[None, :], acc, mask)


@triton.jit
def sum_splits_kernel(
    y, parts, offsets, ranks, slice_table, tiles, rows,
    split_stride, slice_stride, part_stride, y_slice_stride, y_stride, directory_stride,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute `y[s, t, :rank]` of one tile: the sum of its partial sums, in the order of splits."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    index = tl.program_id(1)
    offset, rank = find_weights(offsets, ranks, slice_table, slot, index, directory_stride, UNIT)
    if offset < 0:
        return
    m = tl.arange(0, BLOCK_M)
    row = tl.load(rows + first + m, m < count, 0)
    part_rows = parts + index.to(tl.int64) * slice_stride + row * part_stride
    y_rows = y + index.to(tl.int64) * y_slice_stride + row * y_stride
    sum_parts(y_rows, part_rows, m < count, rank, split_stride, SPLITS, BLOCK_R)


def launch_shrink(
    parts: Tensor, x: Tensor, operands: LayerOperands, groups: Groups, config: ShrinkConfig
) -> None:
    """Fill `parts` [splits, slices, tokens, rank_max] float32 with every split's partial sum."""
    tiles = tile_table(groups, config.block_m)
    shrink_kernel[len(tiles), config.splits, operands.slice_count](
        parts, x, *operands.tables, tiles, groups.rows,
        *parts.stride()[:3], x.stride(0), operands.directory_stride, operands.in_features,
        **shrink_constants(config, x, operands),
    )  # fmt: skip


def launch_sum_splits(
    y: Tensor, parts: Tensor, operands: LayerOperands, groups: Groups, config: ShrinkConfig
) -> None:
    """Sum the output `parts` of `launch_shrink` into `y` [slices, tokens, rank_max]."""
    tiles = tile_table(groups, config.block_m)
    sum_splits_kernel[len(tiles), operands.slice_count](
        y, parts, *operands.tables[1:], tiles, groups.rows,
        *parts.stride()[:3], *y.stride()[:2], operands.directory_stride,
        **sum_constants(config, operands),
    )  # fmt: skip


@triton.jit
def expand_kernel(
    y, x, data, offsets, ranks, slice_table, tiles, rows,
    split_stride, slice_stride, x_stride, y_stride, directory_stride, in_features,
    UNIT: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, OUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute `y[t, o_s + n]` of one tile and one block of a slice's outputs `n`."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    index, block = find_slice(slice_table, tl.program_id(1), SLICES, BLOCK_N)
    offset, rank = find_weights(offsets, ranks, slice_table, slot, index, directory_stride, UNIT)
    if offset < 0:
        return
    m, n = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(rows + first + m, m < count, 0)
    out_features = tl.multiple_of(tl.load(slice_table + 3 * index + 2), OUT_UNIT)
    b = data + b_offset(offset, rank, in_features, UNIT)
    x_rows = x + tl.cast(index, tl.int64) * slice_stride + row * x_stride
    if rank % 8 == 0:
        # The compiler sees a multiple of 8 here, so B's rows start at multiples of 16 bytes.
        acc = expand_block(
            x_rows, b, m < count, n, rank // 8 * 8, out_features, split_stride,
            SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    else:
        acc = expand_block(
            x_rows,
            b,
            m < count,
            n,
            rank,
            out_features,
            split_stride,
            SPLITS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
        )
    column = tl.multiple_of(tl.load(slice_table + 3 * index + 1), OUT_UNIT)
    mask = (m < count)[:, None] & (n < out_features)[None, :]
    add_to_output(y + row * y_stride, column + n, acc, mask)


@triton.jit
def expand_block(
    x_rows, b, row_mask, n, rank, out_features, split_stride,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return `x[rows, :rank] @ B[n, :rank].T`: [BLOCK_M, BLOCK_N] float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        mask = row_mask[:, None] & (r < rank)[None, :]
        x = load_parts(x_rows, r, mask, split_stride, SPLITS)
        acc = multiply_exactly(x, load_b(b, r, n, rank, out_features), acc)
    return acc


def launch_expand(
    y: Tensor, parts: Tensor, operands: LayerOperands, groups: Groups, config: ExpandConfig
) -> None:
    """Add B's product with the sum of `parts` [splits, slices, tokens, rank_max] float32 to `y`."""
    tiles = tile_table(groups, config.block_m)
    expand_kernel[len(tiles), operands.blocks(config.block_n)](
        y, parts, *operands.tables, tiles, groups.rows,
        *parts.stride()[:3], y.stride(0), operands.directory_stride, operands.in_features,
        SLICES=operands.slice_count,
        **expand_constants(config, parts, operands),
    )  # fmt: skip
