"""The `linear` operation on a GPU in one launch, for batches in which launches dominate the cost.

Each program (tile, block of outputs) computes the intermediate for itself and keeps it in
registers. For many rows this is slower than two launches: each block of outputs reads A again, from
the L2 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from loradock.engine.kernels.gpu.common import (
    add_to_output,
    b_offset,
    find_slice,
    find_tile,
    find_weights,
    load_b,
    multiply_exactly,
    shrink_block,
)
from loradock.engine.kernels.gpu.launch import LayerOperands, block_k_of, tile_table
from loradock.engine.kernels.gpu.tile_configs import FusedConfig
from loradock.engine.kernels.operands import Groups


@triton.jit
def fused_kernel(
    y, x, data, offsets, ranks, slice_table, tiles, rows,
    x_stride, y_stride, directory_stride, in_features,
    UNIT: tl.constexpr, SLICES: tl.constexpr, OUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
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
    x_rows, b = x + row * x_stride, data + b_offset(offset, rank, in_features, UNIT)
    if rank % 8 == 0:
        # The compiler sees a multiple of 8 here, so B's rows start at multiples of 16 bytes.
        acc = fused_block(
            x_rows, data + offset, b, m < count, n, rank // 8 * 8, out_features, in_features,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_K,
        )  # fmt: skip
    else:
        acc = fused_block(
            x_rows, data + offset, b, m < count, n, rank, out_features, in_features,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_K,
        )  # fmt: skip
    column = tl.multiple_of(tl.load(slice_table + 3 * index + 1), OUT_UNIT)
    mask = (m < count)[:, None] & (n < out_features)[None, :]
    add_to_output(y + row * y_stride, column + n, acc, mask)


@triton.jit
def fused_block(
    x_rows, a, b, row_mask, n, rank, out_features, in_features,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return `x[rows] @ A.T @ B[n].T`: [BLOCK_M, BLOCK_N] float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        # B's block is loaded early, so that it does not wait for the first product.
        b_block = load_b(b, r, n, rank, out_features)
        shrunk = shrink_block(
            x_rows, a, row_mask, r, rank, 0, in_features, in_features, BLOCK_M, BLOCK_R, BLOCK_K
        )
        acc = multiply_exactly(shrunk, b_block, acc)
    return acc


def launch_fused(
    y: Tensor, x: Tensor, operands: LayerOperands, groups: Groups, config: FusedConfig
) -> None:
    """Add every row's delta to `y` in one launch."""
    tiles = tile_table(groups, config.block_m)
    fused_kernel[len(tiles), operands.blocks(config.block_n)](
        y, x, *operands.tables, tiles, groups.rows,
        x.stride(0), y.stride(0), operands.directory_stride, operands.in_features,
        UNIT=operands.unit,
        SLICES=operands.slice_count,
        OUT_UNIT=operands.out_unit,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        BLOCK_K=block_k_of(config.block_k, x, operands),
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
