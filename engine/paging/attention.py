"""Attention of a flat forward pass, row by row, registered with `transformers` as `FLAT`.

A model that calls `transformers`' attention interface gets this function in place of its own while
a flat pass runs. Windows and chunks come from the mask that the model requests: the mask function
that it would expand over a batch is evaluated over each row's own tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import causal_mask_function

from engine.paging.paged_cache import DecodeGroup, FlatStep, RowSpan

FLAT: Final = "loradock_flat"
"""The name of the attention implementation."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of `transformers`: indices of row, head, query and key, which broadcast -> attends."""

_step: ContextVar[FlatStep] = ContextVar("flat step")


class Scoring(NamedTuple):
    """How queries and keys become scores: None where the model specifies nothing.

    `scaling`: None for the inverse root of the width. `softcap`: bounds scores by a tanh. `sinks`:
    one more score per head, [heads], whose weight is dropped.
    """

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None


class RowMasks:
    """What each row of a pass attends to: (first token, mask of the tokens from there, or None).

    Without a mask, the queries attend to all tokens from the first up to their own. A mask is
    [queries, tokens] bool. `groups`: a mask per group, see `_group_mask`.
    """

    def __init__(self, function: MaskFunction, step: FlatStep) -> None:
        self.step = step
        is_causal = function is causal_mask_function
        self.rows = [
            (0, None)
            if is_causal and (span.count in (1, span.length))
            else _row_mask(function, span, step.written.device)
            for span in step.spans
        ]
        self.groups = [_group_mask(function, group) for group in step.groups]


def _group_mask(function: MaskFunction, group: DecodeGroup) -> Tensor:
    """Return the mask of a group's rows, [rows, 1, 1, width] bool."""
    keys = torch.arange(group.tokens.shape[1], device=group.tokens.device)[None, None, None]
    lengths = group.lengths[:, None, None, None]
    zero = torch.zeros_like(lengths[:1])
    return function(zero, zero, lengths - 1, keys) & (keys < lengths)


def _row_mask(
    function: MaskFunction, span: RowSpan, device: torch.device
) -> tuple[int, Tensor | None]:
    keys = torch.arange(span.length, device=device)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    found = function(zero, zero, keys[-span.count :, None][None, None], keys[None, None, None])
    mask = found.expand(1, 1, span.count, span.length)[0, 0]
    if span.count > 1:
        return 0, mask
    # A window of one query is a slice, which needs no mask.
    first = span.length - int(mask.sum())
    return (first, None) if bool(mask[0, first:].all()) else (0, mask)


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
    scoring = Scoring(*map(options.get, ("scaling", "softcap", "s_aux")))
    output = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    by_head = output.transpose(0, 1)[None]
    for span, (first, mask) in zip(step.spans, attention_mask.rows, strict=True):
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
def flat_attention(configs: list[PretrainedConfig], step: FlatStep) -> Iterator[None]:
    """Let a model's attention be that of `step`; `configs`: its own, parents before their parts."""
    before = [config._attn_implementation for config in configs]
    token = _step.set(step)
    for config in configs:
        config._attn_implementation = FLAT
    try:
        yield
    finally:
        # A parent's assignment reaches its parts, which follow with values of their own.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        _step.reset(token)
