"""Kernels in place of chains of PyTorch's: norms, rotary embeddings, and gates.

All compute in float32 and round once. A row's result does not depend on the other rows.
"""

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from loradock.engine.layout import next_power_of_two

NORM_WIDTH_MAX: Final = 16384
"""A row is in registers at once, so a wider one is not computed here."""

_HEAD_ELEMENTS: Final = 2048
"""The elements of half of the heads of a token that a program rotates."""

_ELEMENTS_PER_WARP: Final = 512

_GATE_ELEMENTS: Final = 2048
"""The columns of a row that a program computes the gate of."""

TWO_ROOTS: Final = tl.constexpr(2 * math.sqrt(2 / math.pi))


@triton.jit
def rms_norm_kernel(y, x, weight, x_stride, width, eps, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `y[row] = x[row] / sqrt(mean(x[row] ** 2) + eps) * (OFFSET + weight)`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    values = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    factors = tl.load(weight + column, mask, 0.0).to(tl.float32) + OFFSET
    tl.store(y + row * width + column, (values * scale * factors).to(y.dtype.element_ty), mask)


@triton.jit
def add_norm_kernel(
    total, y, x, added, weight, x_stride, added_stride, width, eps,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `total[row] = x[row] + added[row]`, and `y[row]` as the norm of that."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    values = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
    values += tl.load(added + row * added_stride + column, mask, 0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + row * width + column, rounded, mask)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    factors = tl.load(weight + column, mask, 0.0).to(tl.float32) + OFFSET
    tl.store(y + row * width + column, (values * scale * factors).to(y.dtype.element_ty), mask)


@triton.jit
def gate_kernel(
    y, gates, ups, gate_stride, up_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute `y[row] = activation(gates[row]) * ups[row]` for a block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gates = tl.load(gates + row * gate_stride + column, mask, 0.0).to(tl.float32)
    ups = tl.load(ups + row * up_stride + column, mask, 0.0).to(tl.float32)
    steps = gates
    if KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
        steps = (gates + 0.044715 * gates * gates * gates) * TWO_ROOTS
    factors = 1.0 / (1.0 + tl.exp(-steps))
    tl.store(y + row * width + column, (gates * factors * ups).to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["tokens"])
def rotate_kernel(
    query_out, key_out, query, keys, cos, sin, tokens, query_heads, key_heads,
    query_row, query_head, query_token, key_row, key_head, key_token, angle_row, angle_token,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the query heads, or the heads of keys, of one token; see `rotate`.

    `query_row` to `angle_token` are strides.
    """
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    angles = row * angle_row + token * angle_token
    if tl.program_id(1) == 0:
        rotate_heads(
            query_out + place * query_heads * (2 * HALF),
            query + row * query_row + token * query_token,
            *(cos + angles, sin + angles, query_heads, query_head, HALF, BLOCK_H, BLOCK),
        )
    else:
        rotate_heads(
            key_out + place * key_heads * (2 * HALF),
            keys + row * key_row + token * key_token,
            *(cos + angles, sin + angles, key_heads, key_head, HALF, BLOCK_H, BLOCK),
        )


@triton.jit
def rotate_heads(
    y, x, cos, sin, heads, head_stride,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute `x * cos + (-x[HALF:], x[:HALF]) * sin` for a block of the heads of one token."""
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    within = column < HALF
    mask = (head < heads) & within
    source = x + head * head_stride + column
    low = tl.load(source, mask, 0.0).to(tl.float32)
    high = tl.load(source + HALF, mask, 0.0).to(tl.float32)
    cos_low = tl.load(cos + column, within, 0.0).to(tl.float32)
    cos_high = tl.load(cos + HALF + column, within, 0.0).to(tl.float32)
    sin_low = tl.load(sin + column, within, 0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF + column, within, 0.0).to(tl.float32)
    target = y + head * (2 * HALF) + column
    tl.store(target, (low * cos_low - high * sin_low).to(y.dtype.element_ty), mask)
    tl.store(target + HALF, (high * cos_high + low * sin_high).to(y.dtype.element_ty), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See `FusedOperations`. Zhang and Sennrich, "Root mean square layer normalization", 2019."""
    width = x.shape[-1]
    _check_width(width)
    rows = _rows(x)
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = next_power_of_two(width)
        rms_norm_kernel[(len(rows),)](
            y, rows, weight, rows.stride(0), width, eps,
            OFFSET=offset, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return y.view(x.shape)


def add_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """See `FusedOperations`."""
    width = x.shape[-1]
    _check_width(width)
    rows, others = _rows(x), _rows(added)
    total, y = (torch.empty(rows.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if len(rows):
        block = next_power_of_two(width)
        add_norm_kernel[(len(rows),)](
            total, y, rows, others, weight, rows.stride(0), others.stride(0), width, eps,
            OFFSET=offset, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return total.view(x.shape), y.view(x.shape)


def gate(gates: Tensor, ups: Tensor, activation: str) -> Tensor:
    """See `FusedOperations`. Shazeer, "GLU variants improve transformer", 2020."""
    width = gates.shape[-1]
    rows, others = _rows(gates), _rows(ups)
    y = torch.empty(rows.shape, dtype=gates.dtype, device=gates.device)
    if len(rows):
        block = min(next_power_of_two(width), _GATE_ELEMENTS)
        gate_kernel[len(rows), triton.cdiv(width, block)](
            y, rows, others, rows.stride(0), others.stride(0), width,
            KIND=activation, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return y.view(gates.shape)


def rotate(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `FusedOperations`. Su et al., "RoFormer", 2021, in the order of GPT-NeoX."""
    rows, query_heads, tokens, width = query.shape
    key_heads = keys.shape[1]
    query_out = query.new_empty(rows, tokens, query_heads, width)
    key_out = keys.new_empty(rows, tokens, key_heads, width)
    block, heads = next_power_of_two(width // 2), max(query_heads, key_heads)
    block_h = min(next_power_of_two(heads), max(1, _HEAD_ELEMENTS // block))
    if rows * tokens:
        rotate_kernel[(rows * tokens, 2, triton.cdiv(heads, block_h))](
            query_out, key_out, query, keys, cos, sin, tokens, query_heads, key_heads,
            *query.stride()[:3], *keys.stride()[:3], *cos.stride()[:2],
            HALF=width // 2, BLOCK_H=block_h, BLOCK=block, num_warps=_warps(block_h * block),
        )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """Return `x` as rows of adjacent elements, a copy only if they are not."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check_width(width: int) -> None:
    if width > NORM_WIDTH_MAX:
        raise ValueError(f"a norm over {width} columns; at most {NORM_WIDTH_MAX} fit")


def _warps(elements: int) -> int:
    return min(16, max(1, elements // _ELEMENTS_PER_WARP))
