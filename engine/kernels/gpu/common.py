"""What every Triton kernel here does: find its tile and its weights, and multiply.

What it is: device functions that are inlined into the kernels. What it is not: a kernel. One rule:
only what holds for every entry of the directory is promised to the compiler: an offset is a
multiple of 128 bytes.
"""

import triton
import triton.language as tl


@triton.jit
def find_tile(tiles, index):
    """(slot, first place in rows, rows) of a tile; zero rows behind the last."""
    slot = tl.load(tiles + 3 * index)
    first = tl.load(tiles + 3 * index + 1)
    count = tl.load(tiles + 3 * index + 2)
    return slot, first, count


@triton.jit
def find_weights(offsets, ranks, layer, slot, place, directory_stride, UNIT: tl.constexpr):
    """(offset of A, rank) of a slice in a slot; the offset is -1 where the slot has nothing.

    `layer`: [slices, 3] int64, a slice's column in the directory, its first output, its outputs.
    """
    entry = slot * directory_stride + tl.load(layer + 3 * place)
    offset = tl.load(offsets + entry)
    rank = tl.load(ranks + entry)
    # -1 is no multiple of anything, but nobody reads at -1.
    return tl.multiple_of(offset, UNIT), rank


@triton.jit
def behind_a(offset, rank, in_features, UNIT: tl.constexpr):
    """Where B starts: behind A's elements, at the next multiple of 128 bytes."""
    elements = rank.to(tl.int64) * in_features
    return offset + (elements + UNIT - 1) // UNIT * UNIT


@triton.jit
def find_slice(layer, block, SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slice, block within it) of a block of outputs, when each slice is cut for itself."""
    place = block * 0
    for s in tl.static_range(SLICES - 1):
        blocks = tl.cdiv(tl.load(layer + 3 * s + 2), BLOCK_N).to(tl.int32)
        is_behind = (place == s) & (block >= blocks)
        block = tl.where(is_behind, block - blocks, block)
        place = tl.where(is_behind, place + 1, place)
    return place, block


@triton.jit
def find_split(in_features, split, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """(first, end) of the inputs of one split."""
    share = tl.cdiv(tl.cdiv(in_features, SPLITS), BLOCK_K) * BLOCK_K
    first = split * share
    return first, tl.minimum(first + share, in_features)


@triton.jit
def multiply(a, b, acc):
    """`acc + a @ b` for activations and weights as they lie in memory."""
    if (a.dtype == b.dtype) and (a.dtype != tl.float32):
        acc = tl.dot(a, b, acc)
    else:
        # Three products of the tensor cores' own format make up for its short mantissa.
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def multiply_exactly(v, b, acc):
    """`acc + v @ b` for a float32 `v` that is not rounded to the weights' dtype."""
    if b.dtype == tl.bfloat16:
        high = v.to(tl.bfloat16)
        low = (v - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(high, b, tl.dot(low, b, acc))
    else:
        # Every float16 is a number of the tensor cores' own format, and its range is wider.
        acc = tl.dot(v, b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def shrink_block(
    x_rows, a, row_mask, r, rank, k_first, k_end, in_features,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`x[rows, k_first:k_end] @ A[r, k_first:k_end].T`: [BLOCK_M, BLOCK_R] float32.

    x_rows: [BLOCK_M] pointers to the rows' first elements. a: pointer to A [rank, in_features].
    """
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    a_rows = a + r.to(tl.int64) * in_features
    for k_block in range(k_first, k_end, BLOCK_K):
        k = k_block + tl.arange(0, BLOCK_K)
        is_within = k < k_end
        x = tl.load(x_rows[:, None] + k[None, :], row_mask[:, None] & is_within[None, :], 0.0)
        # A's rows lie as columns of the second operand.
        a_block = tl.load(
            a_rows[None, :] + k[:, None], (r < rank)[None, :] & is_within[:, None], 0.0
        )
        acc = multiply(x, a_block, acc)
    return acc


@triton.jit
def load_parts(part_rows, r, mask, split_stride, SPLITS: tl.constexpr):
    """The sum over splits of a block of parts, in their order: [rows, BLOCK_R] float32."""
    total = tl.load(part_rows[:, None] + r[None, :], mask, 0.0)
    for split in tl.static_range(1, SPLITS):
        places = part_rows + tl.cast(split, tl.int64) * split_stride
        total += tl.load(places[:, None] + r[None, :], mask, 0.0)
    return total


@triton.jit
def sum_parts(
    y_rows, part_rows, row_mask, rank, split_stride, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr
):
    """`y[rows, :rank]`: the sum of the rows' parts, in their order."""
    for r_first in range(0, rank, BLOCK_R):
        r = r_first + tl.arange(0, BLOCK_R)
        mask = row_mask[:, None] & (r < rank)[None, :]
        total = load_parts(part_rows, r, mask, split_stride, SPLITS)
        tl.store(y_rows[:, None] + r[None, :], total, mask)


@triton.jit
def load_b(b, r, n, rank, width):
    """A block of B [width, rank], its rows as columns: [BLOCK_R, BLOCK_N]; 0 outside."""
    rows = b + n.to(tl.int64) * rank
    return tl.load(rows[None, :] + r[:, None], (r < rank)[:, None] & (n < width)[None, :], 0.0)


@triton.jit
def add_to_output(y_rows, columns, acc, mask, ADD: tl.constexpr):
    """Round the sum of `acc` and what is there, once, and write it; only `acc` without ADD."""
    places = y_rows[:, None] + columns[None, :]
    if ADD:
        acc += tl.load(places, mask, 0.0).to(tl.float32)
    tl.store(places, acc.to(y_rows.dtype.element_ty), mask)
