"""Attention over blocks of keys and values on a GPU, specified by its references.

A program attends the queries of one tile, which share a head of keys, over one part of the tokens
before them, so that each key and value is read once per tile (Dao et al. 2023, "Flash-Decoding").
A second launch merges the parts in their order, without atomics. Scores and sums are float32.

Which tokens are in which part follows from the tokens of the sequence and from the number of parts,
which follows from the launch's bounds; the grid never needs data of the device, so that launches
can be captured. If a row's bits must not depend on its batch, parts have a fixed number of tokens,
counted from the sequence's first one, and all tiles have one size.

In decode steps, tokens that several rows share are read once (Juravsky et al. 2024, "Hydragen"):
the programs of one of these rows attend the queries of all of them to these tokens, and then each
row's programs attend its own query to what follows. So no program reads more than it would alone.
"""

import math
from functools import cache
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from loradock.engine.kernels.block_attention import (
    AttentionOptions,
    BlockOperands,
    check_attention,
)
from loradock.engine.kernels.gpu.launch import DTYPES, Workspace
from loradock.engine.layout import next_power_of_two

LOG2_E: Final = tl.constexpr(math.log2(math.e))

PARTS_MAX: Final = 32
"""The most parts that the tokens of a sequence are divided into, unless parts have a fixed size."""

PART_TOKENS: Final = 1024
"""The tokens of a part of a fixed size."""

PART_TOKENS_MIN: Final = 64
"""The least tokens of the longest sequence for which one more part pays."""

HEADS_MAX: Final = 64
"""The most query heads of a tile; more that share a head of keys are divided among programs."""

SHARED_ROWS: Final = 8
"""The most rows for which one row reads tokens. Tiles of float32, and of layers in which many query
heads share keys, have fewer, and then the tokens are read once for each tile."""

SHARED_TOKENS: Final = 256
"""How many tokens fewer must be read so that one more part of each row pays."""

WRITTEN_ELEMENTS: Final = 1024
"""The elements of keys, and of values, that are written by one program."""

MERGED_HEADS: Final = 4
"""The heads that are merged by one program."""

_WIDE: Final = 64 * 128
_WIDE_BYTES: Final = 1024
"""The elements of a tile's output, and the bytes of a key, from which on eight warps share them."""


class AttentionConfig(NamedTuple):
    """Tiles of at least `rows` queries times heads; `tile_bytes` of keys are loaded at a time.

    `programs`: per multiprocessor, until which the tokens are divided into more parts.
    """

    rows: int
    tile_bytes: int
    warps: int
    stages: int
    programs: int


# Reasoned, not measured: decode steps are bound by memory and keep three loads of 8 KiB of keys and
# of values each in flight; prompts are bound by products.
DECODE: Final = AttentionConfig(16, 8 << 10, 4, 3, 8)
PREFILL: Final = AttentionConfig(64, 16 << 10, 4, 2, 2)


@triton.jit
def find_row(begins, tile, rows, BLOCK_Q: tl.constexpr):
    """Return (row, tile within it) of a tile: rows before it have at most
    `begins[row] // BLOCK_Q + row` tiles together, so that the first tile of a row needs no table.
    """
    low = tile * 0
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(begins + middle) // BLOCK_Q + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low, tile - (tl.load(begins + low) // BLOCK_Q + low)


@triton.jit
def first_attended(index, window, chunk):
    """Return the first token that a sequence's token attends to; 0: no window, no chunks."""
    first = tl.where(window > 0, tl.maximum(index - window + 1, 0), 0)
    return tl.where(chunk > 0, tl.maximum(first, index // tl.maximum(chunk, 1) * chunk), first)


@triton.jit
def find_part(begin, end, part, parts, PART_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (first, end) of the tokens of a part of those from `begin` to `end`."""
    if PART_TOKENS > 0:
        low = tl.maximum(part * PART_TOKENS, begin)
        high = tl.minimum((part + 1) * PART_TOKENS, end)
    else:
        share = tl.cdiv(tl.cdiv(end - begin, parts), BLOCK_N) * BLOCK_N
        low = begin + part * share
        high = tl.minimum(low + share, end)
    return low, high


@triton.jit
def multiply_heads(a, b, acc):
    """Return `acc + a @ b`; float32 is multiplied without rounding it to TF32."""
    if a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def score_tokens(
    q_block, k_block, n, own, own_first, scale, softcap,
    HAS_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the scores of the tokens `n`, in units of log2; -inf for those out of reach."""
    scores = multiply_heads(q_block, k_block, tl.zeros((BLOCK_M, BLOCK_N), tl.float32)) * scale
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap - 2.0 * softcap / (tl.exp(2.0 * scores / softcap) + 1.0)
    attends = (n[None, :] <= own[:, None]) & (n[None, :] >= own_first[:, None])
    return tl.where(attends, scores * LOG2_E, float("-inf"))


@triton.jit
def attend_tokens(
    q_block, k, v, blocks, own, own_first, oldest, low, high, scale, softcap,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend a tile's queries to its sequence's tokens from `low` to `high`.

    Returns the highest scores [BLOCK_M], in units of log2, the sums of exponentials relative to
    them, and the values weighted by these, [BLOCK_M, BLOCK_V].
    """
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for n_first in range(low, high, BLOCK_N):
        n = n_first + tl.arange(0, BLOCK_N)
        # Blocks before the oldest token may be another sequence's by now.
        is_held = (n >= oldest) & (n < high)
        block = tl.load(blocks + n // BLOCK_TOKENS, is_held, 0)
        place = block.to(tl.int64) * BLOCK_TOKENS + n % BLOCK_TOKENS
        k_mask = is_held[None, :] & (d < WIDTH)[:, None]
        k_block = tl.load(k + (place * WIDTH)[None, :] + d[:, None], k_mask, 0.0)
        # Tokens after `high` are another part's: their number is above that of every query.
        n = tl.where(is_held, n, 0x7FFFFFFF)
        scores = score_tokens(
            q_block, k_block, n, own, own_first, scale, softcap, HAS_CAP, BLOCK_M, BLOCK_N
        )
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query without any token so far has the weight 0 for all, and not NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        v_mask = is_held[:, None] & (e < V_WIDTH)[None, :]
        v_block = tl.load(v + (place * V_WIDTH)[:, None] + e[None, :], v_mask, 0.0)
        acc = multiply_heads(weights.to(v_block.dtype), v_block, acc * decay[:, None])
        highest = new_highest
    return highest, total, acc


@triton.jit
def store_sums(sums, at, highest, total, mask):
    """Store what `attend_tokens` returned of the rows `at`."""
    tl.store(sums + 2 * at, highest, mask)
    tl.store(sums + 2 * at + 1, total, mask)


@triton.jit
def store_output(y, at, acc, mask, V_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr):
    """Store outputs [rows, BLOCK_V] as the rows `at` of `y`, in its dtype."""
    e = tl.arange(0, BLOCK_V)
    places = y + (at * V_WIDTH)[:, None] + e[None, :]
    tl.store(places, acc.to(y.dtype.element_ty), mask[:, None] & (e < V_WIDTH)[None, :])


@triton.jit
def attend_shared(
    y, sums, q, k, v, blocks, firsts, members, end, part, parts, head_first, head_block,
    q_stride, q_head_stride, heads, part_rows, window, chunk, scale, softcap,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr, SHARED_ROWS: tl.constexpr, SHARED_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend the one query of each of `members` over a part of the `end` tokens that they share.

    It is written as `attend_kernel` writes parts, as the part `parts + part`. Their heads are those
    from `head_first` on, of which a tile has the block `head_block`. -1 is no member.
    """
    m, d = tl.arange(0, SHARED_Q * BLOCK_H), tl.arange(0, BLOCK_D)
    place, inside = m // BLOCK_H, head_block * BLOCK_H + m % BLOCK_H
    for first in range(0, SHARED_ROWS, SHARED_Q):
        if tl.load(members + first) >= 0:
            token = tl.load(members + first + place, first + place < SHARED_ROWS, -1)
            is_query = (token >= 0) & (inside < GROUP)
            token, head = tl.where(is_query, token, 0), head_first + inside
            q_rows = q + (token * q_stride + head * q_head_stride)
            q_mask = is_query[:, None] & (d < WIDTH)[None, :]
            q_block = tl.load(q_rows[:, None] + d[None, :], q_mask, 0.0)
            index = tl.load(firsts + token, is_query, 0).to(tl.int32)
            attended = first_attended(index, window, chunk)
            oldest = tl.min(tl.where(is_query, attended, 0x7FFFFFFF), 0)
            low, high = find_part(
                tl.minimum(oldest, end) // BLOCK_N * BLOCK_N, end, part, parts, 0, BLOCK_N
            )
            highest, total, acc = attend_tokens(
                q_block, k, v, blocks, index, attended, oldest, low, high, scale, softcap,
                WIDTH, V_WIDTH, BLOCK_TOKENS, HAS_CAP,
                SHARED_Q * BLOCK_H, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip
            at = (parts + part).to(tl.int64) * part_rows + token * heads + head
            store_sums(sums, at, highest, total, is_query)
            store_output(y, at, acc, is_query, V_WIDTH, BLOCK_V)


@triton.jit(do_not_specialize=["row_count", "part_rows", "window", "chunk"])
def attend_kernel(
    y, sums, q, k, v, sinks, begins, firsts, rows, table, shared,
    q_stride, q_head_stride, k_head_stride, v_head_stride, table_stride, heads,
    row_count, part_rows, window, chunk, scale, softcap,
    GROUP: tl.constexpr, HEAD_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, IS_WHOLE: tl.constexpr, PART_TOKENS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_DECODE: tl.constexpr,
    SHARED_ROWS: tl.constexpr, SHARED_Q: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend the queries of one tile over one part of their tokens.

    IS_WHOLE: there is one part, and `y` [tokens, heads, V_WIDTH] is the output. Otherwise it is
    [parts, part_rows, V_WIDTH] float32, not yet divided by the sums, with a row per token and head,
    and `sums` [parts, part_rows, 2] has the highest score and the sum of `attend_tokens`. With
    SHARED_ROWS there are as many parts again, of the tokens that rows share.
    """
    row, inside = tl.program_id(0), 0
    if not IS_DECODE:
        row, inside = find_row(begins, tl.program_id(0), row_count, BLOCK_Q)
    begin = tl.load(begins + row) + inside * BLOCK_Q
    count = (tl.load(begins + row + 1) - begin).to(tl.int32)
    if count <= 0:
        return
    index = tl.load(firsts + row).to(tl.int32) + inside * BLOCK_Q
    kv_head, part = tl.program_id(1) // HEAD_BLOCKS, tl.program_id(2)
    oldest, end = first_attended(index, window, chunk), index + tl.minimum(count, BLOCK_Q)
    blocks = table + tl.load(rows + row) * table_stride
    k_head = k + kv_head.to(tl.int64) * k_head_stride
    v_head = v + kv_head.to(tl.int64) * v_head_stride
    if SHARED_ROWS > 0:
        own = shared + row * (1 + SHARED_ROWS)
        common = tl.load(own).to(tl.int32)
        oldest = tl.maximum(oldest, common)
        if tl.load(own + 1) >= 0:
            attend_shared(
                y, sums, q, k_head, v_head, blocks, firsts, own + 1, common,
                part, tl.num_programs(2), kv_head * GROUP, tl.program_id(1) % HEAD_BLOCKS,
                q_stride, q_head_stride, heads, part_rows, window, chunk, scale, softcap,
                GROUP, WIDTH, V_WIDTH, BLOCK_TOKENS, HAS_CAP, SHARED_ROWS, SHARED_Q,
                BLOCK_H, BLOCK_N, BLOCK_D, BLOCK_V,
            )  # fmt: skip
    m, d = tl.arange(0, BLOCK_Q * BLOCK_H), tl.arange(0, BLOCK_D)
    query, member = m // BLOCK_H, tl.program_id(1) % HEAD_BLOCKS * BLOCK_H + m % BLOCK_H
    is_query = (query < count) & (member < GROUP)
    head, token = kv_head * GROUP + member, begin + query
    q_rows = q + (token * q_stride + head * q_head_stride)
    q_block = tl.load(q_rows[:, None] + d[None, :], is_query[:, None] & (d < WIDTH)[None, :], 0.0)
    # Multiples of BLOCK_N, so that the order of a row's sums does not depend on its tile.
    low, high = find_part(
        oldest // BLOCK_N * BLOCK_N, end, part, tl.num_programs(2), PART_TOKENS, BLOCK_N
    )
    highest, total, acc = attend_tokens(
        q_block, k_head, v_head, blocks,
        index + query, first_attended(index + query, window, chunk), oldest, low, high,
        scale, softcap, WIDTH, V_WIDTH, BLOCK_TOKENS, HAS_CAP,
        BLOCK_Q * BLOCK_H, BLOCK_N, BLOCK_D, BLOCK_V,
    )  # fmt: skip
    at = token * heads + head
    if IS_WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks + head, is_query, 0.0).to(tl.float32) * LOG2_E
            base = tl.maximum(highest, sink)
            acc *= tl.exp2(highest - base)[:, None]
            total = total * tl.exp2(highest - base) + tl.exp2(sink - base)
        acc /= tl.where(is_query, total, 1.0)[:, None]
    else:
        at += part.to(tl.int64) * part_rows
        store_sums(sums, at, highest, total, is_query)
    store_output(y, at, acc, is_query, V_WIDTH, BLOCK_V)


@triton.jit(do_not_specialize=["part_rows", "part_count"])
def merge_kernel(
    y, parts, sums, sinks, shared, heads, part_rows, part_count,
    V_WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr, SHARED_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merge the parts of some heads of one token, in their order.

    y: [tokens, heads, V_WIDTH]; parts, sums: what `attend_kernel` wrote.
    """
    token = tl.program_id(0).to(tl.int64)
    if SHARED_ROWS > 0:
        has_shared = tl.load(shared + token * (1 + SHARED_ROWS)) > 0
        part_count = tl.where(has_shared, 2 * part_count, part_count)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_V)
    is_head = head < heads
    at = token * heads + head
    highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, is_head, 0.0).to(tl.float32) * LOG2_E
        highest = sink
    for part in range(part_count):
        place = tl.cast(part, tl.int64) * part_rows + at
        highest = tl.maximum(highest, tl.load(sums + 2 * place, is_head, 0.0))
    total = tl.zeros((BLOCK_H,), tl.float32)
    if HAS_SINKS:
        total = tl.exp2(sink - highest)
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    for part in range(part_count):
        place = tl.cast(part, tl.int64) * part_rows + at
        weight = tl.exp2(tl.load(sums + 2 * place, is_head, 0.0) - highest)
        total += weight * tl.load(sums + 2 * place + 1, is_head, 0.0)
        # A part without tokens was written as zeros.
        mask = is_head[:, None] & (e < V_WIDTH)[None, :]
        acc += weight[:, None] * tl.load(parts + (place * V_WIDTH)[:, None] + e[None, :], mask, 0.0)
    mask = is_head[:, None] & (e < V_WIDTH)[None, :]
    tl.store(
        y + (at * V_WIDTH)[:, None] + e[None, :],
        (acc / tl.where(is_head, total, 1.0)[:, None]).to(y.dtype.element_ty), mask,
    )  # fmt: skip


@triton.jit
def write_kernel(
    keys, values, new_keys, new_values, places, heads,
    k_head_stride, v_head_stride, k_new_head, k_new_token, v_new_head, v_new_token,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of some heads of one token to the token's place."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (d < WIDTH)
    own = tl.load(new_keys + head * k_new_head + token * k_new_token + d, mask)
    tl.store(keys + head * k_head_stride + place * WIDTH + d, own, mask)
    mask = (head < heads) & (d < V_WIDTH)
    own = tl.load(new_values + head * v_new_head + token * v_new_token + d, mask)
    tl.store(values + head * v_head_stride + place * V_WIDTH + d, own, mask)


def write_tokens(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, places: Tensor
) -> None:
    """Compute as `block_attention.write_tokens` does, in one launch."""
    heads, tokens, width = new_keys.shape
    if new_keys.stride(2) != 1 or new_values.stride(2) != 1:
        raise ValueError("attention over blocks: a token's keys or values are not contiguous")
    v_width = new_values.shape[2]
    block = next_power_of_two(max(width, v_width))
    block_h = min(next_power_of_two(heads), max(1, WRITTEN_ELEMENTS // block))
    if tokens:
        write_kernel[tokens, triton.cdiv(heads, block_h)](
            keys, values, new_keys, new_values, places, heads,
            keys.stride(0), values.stride(0), *new_keys.stride()[:2], *new_values.stride()[:2],
            WIDTH=width, V_WIDTH=v_width, BLOCK_H=block_h, BLOCK=block,
            num_warps=max(1, block_h * block // 512),
        )  # fmt: skip


class TritonAttention:
    """The operation `attend_reference`, with scratch memory for parts.

    `batch_invariant`: the bits of a token's output depend on its sequence alone. `processors`: the
    multiprocessors for which tokens are divided; 0 for those of the device.
    """

    def __init__(self, batch_invariant: bool = False, processors: int = 0) -> None:
        self._part_tokens = PART_TOKENS if batch_invariant else 0
        self._processors = processors
        self._workspace = Workspace()

    def __call__(
        self,
        y: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: BlockOperands,
        options: AttentionOptions,
    ) -> None:
        """Compute as `attend_reference` does; raises ValueError as it does, and for other dtypes.

        One launch, or two if the tokens are divided into parts, or may be shared.
        """
        check_attention(y, query, keys, values, blocks)
        if query.dtype not in DTYPES:
            raise ValueError(f"attention over blocks supports {DTYPES}, got {query.dtype}")
        tokens, heads, v_width = y.shape
        config = self._config(blocks, query.element_size())
        constants = attention_constants(
            config, heads // len(keys), query.shape[2], v_width, query.element_size()
        )
        programs = constants["HEAD_BLOCKS"] * len(keys)
        tiles = len(blocks.rows)
        if not blocks.is_decode:
            tiles += tokens // constants["BLOCK_Q"]
        parts = self._parts(tiles * programs, blocks, config, y.device)
        # Fixed parts are counted from the first token of a sequence, shared or not.
        shared = None if self._part_tokens else blocks.shared
        shared_rows = 0 if shared is None else shared.shape[1] - 1
        is_whole = parts == 1 and not shared_rows
        out, sums = y, y
        if not is_whole:
            rows = (2 if shared_rows else 1) * parts * tokens * heads
            scratch = self._workspace.take((rows * (v_width + 2),), y.device)
            out, sums = scratch[: rows * v_width], scratch[rows * v_width :]
        sinks = y if options.sinks is None else options.sinks
        attend_kernel[tiles, programs, parts](
            out, sums, query, keys, values, sinks,
            blocks.begins, blocks.firsts, blocks.rows, blocks.table,
            blocks.rows if shared is None else shared,
            query.stride(1), query.stride(0), keys.stride(0), values.stride(0),
            blocks.table.stride(0), heads, len(blocks.rows), tokens * heads,
            options.window, options.chunk,
            query.shape[2] ** -0.5 if options.scale is None else options.scale,
            options.softcap or 1.0,
            **constants,
            BLOCK_TOKENS=blocks.block_tokens, IS_WHOLE=is_whole, PART_TOKENS=self._part_tokens,
            HAS_CAP=bool(options.softcap), HAS_SINKS=options.sinks is not None,
            IS_DECODE=blocks.is_decode, SHARED_ROWS=shared_rows,
        )  # fmt: skip
        if not is_whole:
            merge_kernel[tokens, -(-heads // MERGED_HEADS)](
                y, out, sums, sinks, blocks.rows if shared is None else shared,
                heads, tokens * heads, parts,
                V_WIDTH=v_width, HAS_SINKS=options.sinks is not None, SHARED_ROWS=shared_rows,
                BLOCK_H=MERGED_HEADS, BLOCK_V=constants["BLOCK_V"], num_warps=1,
            )  # fmt: skip

    def _config(self, blocks: BlockOperands, item_bytes: int) -> AttentionConfig:
        """Return the tiles of a batch: those of decode steps for all, if bits must be the same.

        Larger ones of float32, whose products are three each, have too few registers.
        """
        is_small = blocks.is_decode or self._part_tokens or item_bytes > 2
        return DECODE if is_small else PREFILL

    def _parts(
        self, programs: int, blocks: BlockOperands, config: AttentionConfig, device: torch.device
    ) -> int:
        """Return the number of parts of each sequence's tokens, from host data alone."""
        if self._part_tokens:
            # At least two, so that every output is merged by the same operations.
            return max(2, -(-blocks.longest // self._part_tokens))
        processors = self._processors or _processors_of(device)
        wanted = -(-config.programs * processors // max(1, programs))
        longest = -(-blocks.longest // PART_TOKENS_MIN)
        return next_power_of_two(max(1, min(wanted, longest, PARTS_MAX)))


def attention_constants(
    config: AttentionConfig, group: int, width: int, v_width: int, item_bytes: int
) -> dict[str, Any]:
    """Return the compile-time constants of `attend_kernel` that follow from a layer's shape.

    group: the query heads that share a head of keys.
    """
    block_h = min(next_power_of_two(group), HEADS_MAX)
    block_q = max(1, config.rows // block_h)
    block_d, block_v = (max(16, next_power_of_two(one)) for one in (width, v_width))
    block_n = min(64, max(16, config.tile_bytes // (block_d * item_bytes)))
    # In float32, whose products are three each, larger tiles have too few registers.
    shared_rows = HEADS_MAX if item_bytes <= 2 else config.rows
    shared_q = max(block_q, min(SHARED_ROWS, shared_rows // block_h))
    is_wide = block_q * block_h * block_v >= _WIDE or block_d * item_bytes >= _WIDE_BYTES
    return {
        "GROUP": group,
        "HEAD_BLOCKS": -(-group // block_h),
        "WIDTH": width,
        "V_WIDTH": v_width,
        "SHARED_Q": shared_q,
        "BLOCK_Q": block_q,
        "BLOCK_H": block_h,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "num_warps": config.warps * (2 if is_wide else 1),
        "num_stages": config.stages,
    }


@cache
def _processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return processors
