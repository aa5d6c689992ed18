"""Attention of a flat forward pass, registered with `transformers` as `FLAT`.

Rows are attended one by one, or together over what they share (`loradock.engine.paging.pieces`).

A model that calls `transformers`' attention interface gets this function in place of its own while
a flat pass runs, and `loradock.engine.paging.masks` in place of its own masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from loradock.engine.models.library.attention import use_attention
from loradock.engine.models.library.names import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
)
from loradock.engine.paging.masks import RowMasks
from loradock.engine.paging.paged_cache import FlatStep, MaskFunction, PagedLayer
from loradock.engine.paging.pieces import Pieces

FLAT: Final = "loradock_flat"
"""The name of the attention implementation."""

_attend_piece: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""PyTorch's function of a CPU, which also returns the logarithms of the sums."""

_step: ContextVar[FlatStep] = ContextVar("flat step")


class Scoring(NamedTuple):
    """How queries and keys become scores: None where the model specifies nothing.

    `scaling`: None for the inverse root of the width. `softcap`: bounds scores by a tanh. `sinks`:
    one more score per head, [heads], whose weight is dropped.
    """

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None


def _mask(*, mask_function: MaskFunction, use_vmap: bool = False, **_: Any) -> RowMasks:
    """The mask of the pass that runs, in place of a tensor over the whole batch."""
    if use_vmap:
        raise TypeError("the mask depends on more than the indices of tokens")
    return RowMasks(mask_function, _step.get())


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return [1, tokens, heads, head_dim] for queries of [1, heads, tokens, head_dim].

    key: as the layer's cache returned it. Raises a `MODEL_CODE_ERRORS` where the model needs
    something that this function does not know.
    """
    del module
    step = _step.get()
    layer = step.layer_of(key)
    if not isinstance(attention_mask, RowMasks) or attention_mask.step is not step:
        raise TypeError("the model changes the attention mask")
    if options.get("position_bias") is not None:
        raise TypeError("the model adds a position bias")
    step.mask_functions.add(attention_mask.function)
    scoring = Scoring(*map(options.get, ("scaling", "softcap", "s_aux")))
    output = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    by_head = output.transpose(0, 1)[None]
    pieces, others = None, attention_mask.rows
    if _can_merge(query, value, scoring):
        pieces, others = attention_mask.divided(layer.token_bytes)
    if pieces is not None:
        output.index_copy_(0, pieces.queries, _attend_pieces(query, layer, pieces, scoring))
    for span, first, mask in others:
        queries = query.narrow(2, span.begin, span.count)
        keys, values = layer.read(span, first)
        if scoring.softcap is None and scoring.sinks is None:
            attended = _attend(queries, keys, values, mask, scoring.scaling)
        else:
            attended = _attend_explicitly(queries, keys, values, mask, scoring)
        by_head.narrow(2, span.begin, span.count).copy_(attended)
    for group, mask in zip(step.groups, attention_mask.groups, strict=True):
        queries = query[0].index_select(1, group.queries).transpose(0, 1)[:, :, None]
        attended = _attend_group(queries, *layer.read_group(group), mask, scoring)
        output.index_copy_(0, group.queries, attended)
    return output[None], None


def _can_merge(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether `_attend_pieces` computes what a model specifies."""
    return query.is_cpu and scoring.softcap is None and query.shape[3] == value.shape[3]


def _attend_pieces(query: Tensor, layer: PagedLayer, pieces: Pieces, scoring: Scoring) -> Tensor:
    """Attend one query per row over its pieces; return [rows, heads, head_dim].

    The output over all pieces is the mean of those over each one, weighted by the sums of their
    exponentiated scores (Juravsky et al. 2024, "Hydragen", section 3.1).
    """
    queries = query[0].index_select(1, pieces.queries)
    heads, rows, width = queries.shape
    found = []
    for piece, copied in zip(pieces.pieces, pieces.copied, strict=True):
        keys, values = layer.read_tokens(piece.start, piece.tokens, copied)
        # The heads that share keys are queries of one head, so that nothing is repeated.
        packed = queries.narrow(1, piece.row, piece.rows).reshape(1, keys.shape[1], -1, width)
        output, logarithms = _attend_piece(packed, keys, values, scale=scoring.scaling)
        shape = (heads, piece.rows, width)
        found.append((output.reshape(shape), logarithms.reshape(shape[:2])))
    outputs, logarithms = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    # The logarithms of the sums of each part; those of the sinks are one more part.
    sums = logarithms.new_full((heads, pieces.parts + 1, rows), -torch.inf)
    sums.view(heads, -1).index_copy_(1, pieces.places, logarithms)
    if scoring.sinks is not None:
        sums[:, -1] = scoring.sinks[:, None]
    weights = sums.softmax(1).view(heads, -1).index_select(1, pieces.places)
    merged = logarithms.new_zeros(heads, rows, width)
    merged.index_add_(1, pieces.rows, outputs * weights[:, :, None])
    return merged.transpose(0, 1).to(query.dtype)


def _attend_group(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """Attend one query per row, [rows, heads, 1, head_dim]; return [rows, heads, head_dim]."""
    rows, heads, _, width = queries.shape
    if scoring.softcap is not None or scoring.sinks is not None:
        return _attend_explicitly(queries, keys, values, mask, scoring)[:, :, 0]
    packed = queries.reshape(rows, keys.shape[1], -1, width)
    attended = scaled_dot_product_attention(
        packed, keys, values, attn_mask=mask, scale=scoring.scaling
    )
    return attended.reshape(rows, heads, values.shape[3])


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend with PyTorch's function; queries: [1, heads, queries, head_dim]."""
    _, heads, count, width = queries.shape
    groups = keys.shape[1]
    if count == 1 and mask is None and heads != groups:
        # The heads that share keys are queries of one head, so that nothing is repeated.
        packed = queries.view(1, groups, heads // groups, width)
        attended = scaled_dot_product_attention(packed, keys, values, scale=scaling)
        return attended.reshape(1, heads, 1, values.shape[3])
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        scale=scaling,
        enable_gqa=heads != groups,
    )


def _attend_explicitly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """Attend as `_attend` does, with soft-capped scores or sinks."""
    scaling, softcap, sinks = scoring
    rows, heads, count, width = queries.shape
    packed = queries.reshape(rows, keys.shape[1], -1, width)
    scores = packed @ keys.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    scores = scores.view(rows, heads, count, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and count > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        columns = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(rows, heads, count, 1)
        scores = torch.cat([scores, columns], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)[..., : keys.shape[2]]
    packed = weights.reshape(rows, keys.shape[1], -1, keys.shape[2])
    return (packed @ values).view(rows, heads, count, values.shape[3])


AttentionInterface.register(FLAT, _attention)
AttentionMaskInterface.register(FLAT, _mask)


@contextmanager
def flat_attention(configs: list[PreTrainedConfig], step: FlatStep) -> Iterator[None]:
    """Let a model's attention be that of `step`; `configs`: its own, parents before their parts."""
    token = _step.set(step)
    try:
        with use_attention(configs, FLAT):
            yield
    finally:
        _step.reset(token)
