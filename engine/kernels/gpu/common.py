"""Device functions of the Triton kernels: finding a tile and its weights, and products.

The compiler is promised only what is true for every entry of the directory: an offset is a multiple
of 128 bytes.
"""

import triton
import triton.language as tl


@triton.jit
def find_tile(tiles, index):
    """Return (slot, first index into rows, rows) of a tile; zero rows after the last tile."""
    slot = tl.load(tiles + 3 * index)
    first = tl.load(tiles + 3 * index + 1)
    count = tl.load(tiles + 3 * index + 2)
    return slot, first, count


@triton.jit
def find_weights(offsets, ranks, slice_table, slot, index, directory_stride, UNIT: tl.constexpr):
    """Return (offset of A, rank) of a slice in a slot; the offset is -1 if the slice is absent.

    `slice_table`: [slices, 3] int64: column of the directory, first output, number of outputs.
    """
    entry = slot * directory_stride + tl.load(slice_table + 3 * index)
    offset = tl.load(offsets + entry)
    rank = tl.load(ranks + entry)
    # An offset of -1 is not a multiple, but no kernel reads at it.
    return tl.multiple_of(offset, UNIT), rank


@triton.jit
def b_offset(offset, rank, in_features, UNIT: tl.constexpr):
    """Return the offset of B: after A's elements, at the next multiple of 128 bytes."""
    elements = rank.to(tl.int64) * in_features
    return offset + (elements + UNIT - 1) // UNIT * UNIT


@triton.jit
def find_slice(slice_table, block, SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (slice, block within it) of a block of outputs; every slice starts a new block."""
    index = block * 0
    for s in tl.static_range(SLICES - 1):
        blocks = tl.cdiv(tl.load(slice_table + 3 * s + 2), BLOCK_N).to(tl.int32)
        is_after = (index == s) & (block >= blocks)
        block = tl.where(is_after, block - blocks, block)
        index = tl.where(is_after, index + 1, index)
    return index, block


@triton.jit
def find_split(in_features, split, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return (first, end) of the inputs of one split."""
    share = tl.cdiv(tl.cdiv(in_features, SPLITS), BLOCK_K) * BLOCK_K
    first = split * share
    return first, tl.minimum(first + share, in_features)


@triton.jit
def multiply(a, b, acc):
    """Return `acc + a @ b` for activations and weights in their stored dtypes."""
    if (a.dtype == b.dtype) and (a.dtype != tl.float32):
        acc = tl.dot(a, b, acc)
    else:
        # Three TF32 products make up for the short mantissa of TF32.
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def multiply_exactly(v, b, acc):
    """Return `acc + v @ b` for a float32 `v` that is not rounded to the weights' dtype."""
    if b.dtype == tl.bfloat16:
        high = v.to(tl.bfloat16)
        low = (v - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(high, b, tl.dot(low, b, acc))
    else:
        # Every float16 value is exact in TF32, which has a wider range.
        acc = tl.dot(v, b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def shrink_block(
    x_rows, a, row_mask, r, rank, k_first, k_end, in_features,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return `x[rows, k_first:k_end] @ A[r, k_first:k_end].T`: [BLOCK_M, BLOCK_R] float32.

    x_rows: [BLOCK_M] pointers to the rows' first elements. a: pointer to A [rank, in_features].
    """
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    a_rows = a + r.to(tl.int64) * in_features
    for k_block in range(k_first, k_end, BLOCK_K):
        k = k_block + tl.arange(0, BLOCK_K)
        is_within = k < k_end
        x = tl.load(x_rows[:, None] + k[None, :], row_mask[:, None] & is_within[None, :], 0.0)
        # A's rows are the columns of the second operand.
        a_block = tl.load(
            a_rows[None, :] + k[:, None], (r < rank)[None, :] & is_within[:, None], 0.0
        )
        acc = multiply(x, a_block, acc)
    return acc


@triton.jit
def load_parts(part_rows, r, mask, split_stride, SPLITS: tl.constexpr):
    """Return the sum of a block's partial sums, in the order of splits: [rows, BLOCK_R] float32."""
    total = tl.load(part_rows[:, None] + r[None, :], mask, 0.0)
    for split in tl.static_range(1, SPLITS):
        pointers = part_rows + tl.cast(split, tl.int64) * split_stride
        total += tl.load(pointers[:, None] + r[None, :], mask, 0.0)
    return total


@triton.jit
def sum_parts(
    y_rows, part_rows, row_mask, rank, split_stride, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Write the sum of the rows' partial sums, in the order of splits, to `y[rows, :rank]`."""
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        mask = row_mask[:, None] & (r < rank)[None, :]
        total = load_parts(part_rows, r, mask, split_stride, SPLITS)
        tl.store(y_rows[:, None] + r[None, :], total, mask)


@triton.jit
def load_b(b, r, n, rank, out_features):
    """Return a block of B [out_features, rank], transposed: [BLOCK_R, BLOCK_N]; 0 outside."""
    rows = b + n.to(tl.int64) * rank
    return tl.load(
        rows[None, :] + r[:, None], (r < rank)[:, None] & (n < out_features)[None, :], 0.0
    )


@triton.jit
def add_to_output(y_rows, columns, acc, mask):
    """Write the sum of `acc` and the output, rounded once."""
    pointers = y_rows[:, None] + columns[None, :]
    acc += tl.load(pointers, mask, 0.0).to(tl.float32)
    tl.store(pointers, acc.to(y_rows.dtype.element_ty), mask)
