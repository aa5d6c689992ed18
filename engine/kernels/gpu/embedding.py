"""The lookup of an embedding's A on a GPU: a row of A per token. B follows in the expand kernel."""

import triton
import triton.language as tl
from torch import Tensor

from loradock.engine.kernels.gpu.common import find_tile, find_weights
from loradock.engine.kernels.gpu.launch import LayerOperands, tile_table
from loradock.engine.kernels.gpu.tile_configs import LookupConfig
from loradock.engine.kernels.operands import Groups


@triton.jit
def lookup_kernel(
    y, token_ids, data, offsets, ranks, slice_table, tiles, rows,
    y_stride, directory_stride, scale,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute `y[t, :rank] = scale * A[token_ids[t]]` of one tile."""
    slot, first, count = find_tile(tiles, tl.program_id(0))
    if count == 0:
        return
    offset, rank = find_weights(offsets, ranks, slice_table, slot, 0, directory_stride, UNIT)
    if offset < 0:
        return
    m = tl.arange(0, BLOCK_M)
    row = tl.load(rows + first + m, m < count, 0)
    token = tl.load(token_ids + row, m < count, 0)
    if rank % 8 == 0:
        # The compiler sees a multiple of 8 here, so A's rows start at multiples of 16 bytes.
        copy_rows(
            y + row * y_stride, data + offset, token, m < count, rank // 8 * 8, scale, BLOCK_R
        )
    else:
        copy_rows(y + row * y_stride, data + offset, token, m < count, rank, scale, BLOCK_R)


@triton.jit
def copy_rows(y_rows, a, token, row_mask, rank, scale, BLOCK_R: tl.constexpr):
    """Write `scale * A[token]` to float32 rows; A is [vocabulary, rank]."""
    a_rows = a + token * rank
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        mask = row_mask[:, None] & (r < rank)[None, :]
        values = tl.load(a_rows[:, None] + r[None, :], mask, 0.0).to(tl.float32)
        tl.store(y_rows[:, None] + r[None, :], values * scale, mask)


def launch_lookup(
    y: Tensor,
    token_ids: Tensor,
    operands: LayerOperands,
    groups: Groups,
    scale: float,
    config: LookupConfig,
) -> None:
    """Fill `y` [tokens, rank_max] float32 with the rows of A at `token_ids` [tokens]."""
    tiles = tile_table(groups, config.block_m)
    lookup_kernel[(len(tiles),)](
        y, token_ids, *operands.tables, tiles, groups.rows,
        y.stride(0), operands.directory_stride, scale,
        UNIT=operands.unit,
        BLOCK_M=config.block_m,
        BLOCK_R=config.block_r,
        num_warps=config.warps,
    )  # fmt: skip
