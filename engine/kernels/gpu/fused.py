"""Both halves of a LoRA product in one launch, for batches so small that launches are the cost.

What it is: one program for each (tile, block of outputs), which makes the intermediate for itself
and keeps it in registers. What it is not: for many rows; each block of outputs reads A again, out
of the second-level cache. One rule: its contract is `engine.kernels.reference.linear`'s.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.common import (
    add_to_output,
    behind_a,
    find_slice,
    find_tile,
    find_weights,
    load_b,
    multiply_exactly,
    shrink_block,
)
from engine.kernels.gpu.launch import Layer, block_k_of, tiles_of
from engine.kernels.gpu.tile_configs import FusedPlan
from engine.kernels.operands import Groups


@triton.jit
def fused_kernel(
    y, x, data, offsets, ranks, layer, tiles, rows,
    x_stride, y_stride, directory_stride, in_features, scale,
    UNIT: tl.constexpr, SLICES: tl.constexpr, OUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`y[t, o_s + n]` of one tile and one block of a slice's outputs `n`."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    place, block = find_slice(layer, tl.program_id(1), SLICES, BLOCK_N)
    offset, rank = find_weights(offsets, ranks, layer, slot, place, directory_stride, UNIT)
    if offset < 0:
        return
    m, n = tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(rows + first + m, m < count, 0)
    width = tl.multiple_of(tl.load(layer + 3 * place + 2), OUT_UNIT)
    x_rows, b = x + row * x_stride, data + behind_a(offset, rank, in_features, UNIT)
    if rank % 8 == 0:
        # The compiler sees that this is a multiple of eight, so B's rows start at 16 bytes.
        acc = fused_block(
            x_rows, data + offset, b, m < count, n, rank // 8 * 8, width, in_features, scale,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_K,
        )  # fmt: skip
    else:
        acc = fused_block(
            x_rows, data + offset, b, m < count, n, rank, width, in_features, scale,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_K,
        )  # fmt: skip
    column = tl.multiple_of(tl.load(layer + 3 * place + 1), OUT_UNIT)
    mask = (m < count)[:, None] & (n < width)[None, :]
    add_to_output(y + row * y_stride, column + n, acc, mask, True)


@triton.jit
def fused_block(
    x_rows, a, b, row_mask, n, rank, width, in_features, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`scale * x[rows] @ A.T @ B[n].T`: [BLOCK_M, BLOCK_N] float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        # B's block does not wait for the first product.
        b_block = load_b(b, r, n, rank, width)
        shrunk = shrink_block(
            x_rows, a, row_mask, r, rank, 0, in_features, in_features, BLOCK_M, BLOCK_R, BLOCK_K
        )
        acc = multiply_exactly(shrunk * scale, b_block, acc)
    return acc


def launch_fused(
    y: Tensor, x: Tensor, layer: Layer, groups: Groups, scale: float, plan: FusedPlan
) -> None:
    """Add every row's delta to `y` in one launch."""
    tiles = tiles_of(groups, plan.height)
    fused_kernel[len(tiles), layer.blocks(plan.block_n)](
        *(y, x, *layer.operands, tiles, groups.rows),
        *(x.stride(0), y.stride(0), layer.directory_stride, layer.in_features, scale),
        UNIT=layer.unit,
        SLICES=layer.slices,
        OUT_UNIT=layer.out_unit(0),
        BLOCK_M=plan.height,
        BLOCK_N=plan.block_n,
        BLOCK_R=plan.block_r,
        BLOCK_K=block_k_of(plan.block_k, x, layer),
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
