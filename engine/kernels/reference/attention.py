"""Reference of attention over blocks: each row's keys and values gathered, and one softmax."""

from typing import Final

import torch
from torch import Tensor

from loradock.engine.kernels.block_attention import (
    AttentionOptions,
    BlockAttention,
    BlockOperands,
    check_attention,
    write_tokens,
)
from loradock.engine.kernels.operands import accumulator_dtype


def attend_reference(
    y: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: BlockOperands,
    options: AttentionOptions,
) -> None:
    """Attend each new token to the tokens of its sequence up to itself, within its window.

    y: [tokens, heads, v_width], overwritten. query: [heads, tokens, width]. keys: [kv_heads,
    places, width]; values: [kv_heads, places, v_width]; block b is at the places from
    `b * block_tokens` on. Consecutive query heads share a head of keys. Raises ValueError for
    operands that don't fit.
    """
    check_attention(y, query, keys, values, blocks)
    begins, firsts = blocks.begins.tolist(), blocks.firsts.tolist()
    for row, (begin, end, first) in enumerate(zip(begins, begins[1:], firsts, strict=False)):
        own = torch.arange(first, first + end - begin, device=query.device)
        others = torch.arange(first + end - begin, device=query.device)
        attends = _attends(own[:, None], others, options)
        used = others[attends.any(0)]
        found = blocks.table[blocks.rows[row]].long()[used // blocks.block_tokens]
        places = found * blocks.block_tokens + used % blocks.block_tokens
        y[begin:end] = _attend(
            query[:, begin:end], keys[:, places], values[:, places], attends[:, used], options
        )


def _attends(own: Tensor, others: Tensor, options: AttentionOptions) -> Tensor:
    attends = others <= own
    if options.window:
        attends = attends & (others > own - options.window)
    if options.chunk:
        attends = attends & (others // options.chunk == own // options.chunk)
    return attends


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, attends: Tensor, options: AttentionOptions
) -> Tensor:
    """Return [queries, heads, v_width] for [heads, queries, width]; attends: [queries, keys]."""
    heads, queries, width = query.shape
    dtype = accumulator_dtype(query.dtype)
    shared = query.reshape(len(keys), -1, width).to(dtype)
    scores = shared @ keys.to(dtype).mT * (width**-0.5 if options.scale is None else options.scale)
    scores = scores.view(heads, queries, -1)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~attends, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(dtype)[:, None, None].expand(-1, queries, -1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].reshape(len(keys), -1, keys.shape[1])
    found = (weights @ values.to(dtype)).view(heads, queries, -1)
    return found.transpose(0, 1).to(query.dtype)


REFERENCE_ATTENTION: Final = BlockAttention(attend_reference, write_tokens)
