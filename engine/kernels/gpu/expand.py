"""The second half of a LoRA product on a GPU; the contract is `engine.kernels.reference.expand`'s.

What it is: one launch over (tile, block of outputs), all slices' blocks side by side. What it is
not: a reader of padding; ranks that are a multiple of eight are read in 128-bit loads, others in
narrower ones. One rule: the intermediate stays float32, and the sum with the base output is rounded
once.
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
    load_parts,
    multiply_exactly,
)
from engine.kernels.gpu.launch import Layer, expand_constants, tiles_of
from engine.kernels.gpu.tile_configs import ExpandPlan
from engine.kernels.operands import Groups


@triton.jit
def expand_kernel(
    y, x, data, offsets, ranks, layer, tiles, rows,
    split_stride, slice_stride, x_stride, y_stride, directory_stride, in_features, y_offset,
    UNIT: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`y[t, y_offset + o_s + n]` of one tile and one block of a slice's outputs `n`."""
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
    b = data + behind_a(offset, rank, in_features, UNIT)
    x_rows = x + tl.cast(place, tl.int64) * slice_stride + row * x_stride
    if rank % 8 == 0:
        # The compiler sees that this is a multiple of eight, so B's rows start at 16 bytes.
        acc = expand_block(
            x_rows, b, m < count, n, rank // 8 * 8, width, split_stride,
            SPLITS, BLOCK_M, BLOCK_N, BLOCK_R,
        )  # fmt: skip
    else:
        acc = expand_block(
            x_rows, b, m < count, n, rank, width, split_stride, SPLITS, BLOCK_M, BLOCK_N, BLOCK_R
        )
    column = tl.multiple_of(tl.load(layer + 3 * place + 1) + y_offset, OUT_UNIT)
    mask = (m < count)[:, None] & (n < width)[None, :]
    add_to_output(y + row * y_stride, column + n, acc, mask, ADD)


@triton.jit
def expand_block(
    x_rows, b, row_mask, n, rank, width, split_stride,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`x[rows, :rank] @ B[n, :rank].T`: [BLOCK_M, BLOCK_N] float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        mask = row_mask[:, None] & (r < rank)[None, :]
        x = load_parts(x_rows, r, mask, split_stride, SPLITS)
        acc = multiply_exactly(x, load_b(b, r, n, rank, width), acc)
    return acc


# What a launch depends on; a record for it would have this one reader.
def launch_expand(
    y: Tensor,
    parts: Tensor,
    layer: Layer,
    groups: Groups,
    plan: ExpandPlan,
    *,
    offset: int = 0,
    add_inputs: bool = True,
) -> None:
    """Add B's product with the sum of `parts` [splits, slices, tokens, rank_max] float32 to `y`."""
    tiles = tiles_of(groups, plan.height)
    expand_kernel[len(tiles), layer.blocks(plan.block_n)](
        *(y, parts, *layer.operands, tiles, groups.rows, *parts.stride()[:3]),
        *(y.stride(0), layer.directory_stride, layer.in_features, offset),
        SLICES=layer.slices,
        ADD=add_inputs,
        **expand_constants(plan, parts, layer, offset),
    )
