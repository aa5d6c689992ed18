"""Attention of packed forward passes: masks of each sequence, and cascades over shared blocks.

A model that calls `transformers`' attention interface gets `_attention` in place of its own while a
packed pass runs, and `SequenceMasks` in place of its own masks. Windows and chunks come from the
mask that the model requests: the function that it would expand over a batch is evaluated over the
indices of one sequence.

Sequences are attended one by one, or as a cascade over the segments of memory that they share. One
that began with the blocks of others is in several places of the memory: it attends to each segment,
and what it finds there is merged, so that it is not copied whole. Sequences that began with the
same blocks attend to these together, in one call.
"""

import sys
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from loradock.engine.kernels.block_attention import AttentionOptions
from loradock.engine.models.library.generation import use_attention
from loradock.engine.models.library.names import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    causal_mask_function,
)
from loradock.engine.serving.blocks import BLOCK_TOKENS, common_blocks
from loradock.engine.serving.paged_cache import (
    DecodeGroup,
    GatheredStep,
    KernelStep,
    MaskFunction,
    PackedStep,
    PagedLayer,
    SequenceSpan,
)

PACKED: Final = "loradock_packed"
"""The name of the attention implementation."""

CALL_BYTES: Final = 384 << 10
"""The bytes of keys and values whose reading takes as long as a further call.

Measured with 12 heads of 64 in float32: 25 us per call, and 0.4 us for the 6 KiB of a token.
"""

COPY_TOKENS: Final = 0.5
"""The tokens whose reading takes as long as copying one."""


_SAMPLES: Final = 16
"""The tokens of the longest sequence whose masks are looked at whole, for gaps."""

_attend_segment: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""PyTorch's function of a CPU, which also returns the logarithms of the sums."""


class _Pass(NamedTuple):
    step: PackedStep
    ranges: "MaskRanges"


_step: ContextVar[_Pass] = ContextVar("packed step")


class SequencePlace(NamedTuple):
    """A sequence's place: its query in the pass, and `tokens` tokens from `first` on in its blocks.

    Its last block is in no other sequence. `is_copied`: whether it is copied to be read alone.
    """

    query: int
    blocks: list[int]
    first: int
    tokens: int
    is_copied: bool


class KVSegment(NamedTuple):
    """Tokens to which one or several sequences attend: `tokens` from `start` in the memory.

    The sequences are `rows` of `KVSegments.queries` from `row` on. `part`: the number of segments
    that each of them has before this one. `blocks`: those of the tokens, if they are not adjacent
    and have to be copied.
    """

    start: int
    tokens: int
    row: int
    rows: int
    part: int
    blocks: Sequence[int] = ()


class KVSegments(NamedTuple):
    """The segments of several sequences, each with its part of their outputs; a row per sequence.

    Tensors are int64 on the device. queries: [rows], of the pass. parts: the most segments of a
    row. rows: [outputs], the row of each output, in the order of `segments`. places: [outputs], its
    place in a table of [parts, rows]. copied: for each segment its blocks, or None.
    """

    queries: Tensor
    parts: int
    segments: Sequence[KVSegment]
    rows: Tensor
    places: Tensor
    copied: Sequence[Tensor | None]


def find_segments(
    places: Sequence[SequencePlace], token_bytes: int, device: torch.device
) -> KVSegments | None:
    """Return the segments of the sequences for which they take less time; None if there are none.

    The others are read one by one, and copied if their blocks are not adjacent. token_bytes: of
    one token's keys and values.
    """
    call_tokens = CALL_BYTES / token_bytes
    chosen: list[SequencePlace] = []
    segments: list[KVSegment] = []
    places = sorted(places, key=lambda one: (one.first, one.blocks))
    for _, found in groupby(places, key=lambda one: (one.first, one.blocks[0])):
        group = tuple(found)
        if len(group) == 1 and not group[0].is_copied:
            continue
        own = list(_segments_of(group, len(chosen), call_tokens))
        read = sum(_cost(segment.tokens, bool(segment.blocks)) for segment in own)
        alone = sum(_cost(row.tokens, row.is_copied) for row in group)
        if read + call_tokens * (len(own) - len(group)) < alone:
            chosen += group
            segments += own
    return _with_tensors(chosen, segments, device) if segments else None


def _cost(tokens: int, is_copied: bool) -> float:
    """Return the tokens whose reading takes as long as reading these, without the call."""
    return tokens * (1 + COPY_TOKENS * is_copied)


def _segments_of(
    rows: Sequence[SequencePlace], number: int, call_tokens: float
) -> Iterator[KVSegment]:
    """Yield the segments of sorted rows, the first of which has this number.

    call_tokens: those whose reading takes as long as a call.
    """
    # Rows that have `begin` blocks in common, the first one's number, and their segments so far.
    # There is no recursion, because a branch may divide for each of the rows.
    pending = [(rows, 0, number, 0)]
    while pending:
        group, begin, row, part = pending.pop()
        end, is_end = _common(group, begin)
        if is_end or (len(group) - 1) * (end - begin) * BLOCK_TOKENS >= call_tokens:
            for start, tokens, blocks in _reads(group[0], begin, end, call_tokens):
                yield KVSegment(start, tokens, row, len(group), part, blocks)
                part += 1
            begin = end
        if not is_end:
            branches = _branches(group, row, end)
            pending += ((branch, begin, first, part) for branch, first in reversed(branches))


def _branches(
    rows: Sequence[SequencePlace], number: int, same: int
) -> list[tuple[Sequence[SequencePlace], int]]:
    """Divide sorted rows by their block after `same` blocks; return each part and its number."""
    parts = [tuple(found) for _, found in groupby(rows, lambda one: one.blocks[same : same + 1])]
    return list(zip(parts, accumulate(map(len, parts), initial=number), strict=False))


def _common(rows: Sequence[SequencePlace], begin: int) -> tuple[int, bool]:
    """Return how many blocks sorted rows have in common, at least `begin`; whether it is all."""
    last = rows[-1].blocks
    same = common_blocks(rows[0].blocks, last, begin)
    return same, same == len(last)


def _reads(
    row: SequencePlace, begin: int, end: int, call_tokens: float
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yield the segments of a row's blocks from `begin` to `end`: start, tokens, copied blocks.

    Short runs of adjacent blocks that follow each other are copied, rather than read in many calls.
    """
    short = call_tokens / COPY_TOKENS / BLOCK_TOKENS
    runs = _runs(row.blocks, begin, end)
    for is_short, found in groupby(runs, key=lambda run: run[1] - run[0] < short):
        own = list(found)
        for first, last in [(own[0][0], own[-1][1])] if is_short else own:
            # The first block of a row and its last one may be partly used.
            skipped = 0 if first else row.first
            stop = min(last * BLOCK_TOKENS, row.first + row.tokens)
            start = row.blocks[first] * BLOCK_TOKENS + skipped
            copied = row.blocks[first:last] if is_short and len(own) > 1 else ()
            yield start, stop - first * BLOCK_TOKENS - skipped, copied


def _runs(blocks: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where each run of adjacent blocks from `begin` to `end` begins and ends."""
    pairs = enumerate(pairwise(blocks[begin:end]), begin + 1)
    cuts = (at for at, (before, after) in pairs if after != before + 1)
    return pairwise((begin, *cuts, end) if begin < end else ())


def _with_tensors(
    chosen: Sequence[SequencePlace], segments: Sequence[KVSegment], device: torch.device
) -> KVSegments:
    queries = torch.tensor([row.query for row in chosen], device=device)
    outputs = [
        (row, segment.part * len(chosen) + row)
        for segment in segments
        for row in range(segment.row, segment.row + segment.rows)
    ]
    rows, places = torch.tensor(outputs, device=device).unbind(1)
    copied = [
        torch.tensor(segment.blocks, device=device) if segment.blocks else None
        for segment in segments
    ]
    return KVSegments(
        queries, 1 + max(segment.part for segment in segments), segments, rows, places, copied
    )


class SequenceMask(NamedTuple):
    """Context of a sequence: its tokens in memory from `first` on, counted from 0.

    mask: [queries, tokens] bool, from `first` on. None: all up to each query's own token.
    """

    span: SequenceSpan
    first: int
    mask: Tensor | None


class SequenceMasks:
    """The mask of some layers in one pass, evaluated when the first of them attends.

    Some models request masks that none of their layers uses.
    """

    def __init__(self, function: MaskFunction, step: GatheredStep) -> None:
        self.function: Final = function
        self.step: Final = step
        # By the bytes of a token, which may differ among layers.
        self._divided: dict[int, tuple[KVSegments | None, list[SequenceMask]]] = {}

    @cached_property
    def rows(self) -> list[SequenceMask]:
        """The masks of the step's spans.

        Raises `RuntimeError` if a token is attended to whose block was given up.
        """
        device = self.step.written.device
        return [
            SequenceMask(span, *_sequence_mask(self.function, span, device))
            for span in self.step.spans
        ]

    def divided(self, token_bytes: int) -> tuple[KVSegments | None, list[SequenceMask]]:
        """Return the segments of decodes that share or copy blocks, and the masks of the others.

        token_bytes: of one token's keys and values in the layer that attends.
        """
        if token_bytes not in self._divided:
            self._divided[token_bytes] = self._divide(token_bytes)
        return self._divided[token_bytes]

    def _divide(self, token_bytes: int) -> tuple[KVSegments | None, list[SequenceMask]]:
        places = [
            SequencePlace(
                span.begin,
                span.blocks[first // BLOCK_TOKENS :],
                first % BLOCK_TOKENS,
                span.held - first,
                span.numbers is not None,
            )
            for span, first, mask in self.rows
            if span.count == 1 and mask is None
        ]
        segments = find_segments(places, token_bytes, self.step.written.device)
        if segments is None:
            return None, self.rows
        chosen = set(segments.queries.tolist())
        return segments, [row for row in self.rows if row.span.begin not in chosen]

    @cached_property
    def groups(self) -> list[Tensor]:
        """The masks of the step's groups, each [rows, 1, 1, width] bool; raises as `rows` does."""
        return [_group_mask(self.function, group) for group in self.step.groups]


def longest_lookback(functions: Iterable[MaskFunction], tokens: int, device: torch.device) -> int:
    """Return how many tokens before itself a token attends to, at most, under all these masks.

    tokens: those of the longest sequence. The result is at least 1. It is `tokens - 1` or more, so
    that it excludes nothing, if one of the masks has no bound, or gaps.
    """
    return max((_lookback(function, tokens, device) for function in functions), default=tokens)


def _lookback(function: MaskFunction, tokens: int, device: torch.device) -> int:
    """Return the largest distance at which a token attends to another; more if that is unknown.

    Bisection finds it if each token attends to all those from some first one on, as under
    windows and chunks: no distance above it has any. Masks with gaps are looked for in samples.
    """
    index = torch.arange(tokens, device=device)

    def is_beyond(distance: int) -> bool:
        return not bool(_attends(function, index[distance:], index[: tokens - distance]).any())

    lookback = max(1, bisect_left(range(1, tokens), True, key=is_beyond))
    for query in torch.linspace(0, tokens - 1, _SAMPLES).long().tolist():
        if bool(_attends(function, index[query], index[: max(0, query - lookback)]).any()):
            return tokens
    return lookback


def _attends(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether tokens attend to others of their sequence; the indices broadcast."""
    zero = torch.zeros((), dtype=torch.int64, device=queries.device)
    return function(zero, zero, queries, keys)


def _sequence_mask(
    function: MaskFunction, span: SequenceSpan, device: torch.device
) -> tuple[int, Tensor | None]:
    is_whole = span.count in (1, span.length) and not span.start
    if is_whole and function is causal_mask_function:
        return 0, None
    keys = torch.arange(span.length, device=device)
    found = _attends(function, keys[-span.count :, None], keys)
    mask = found.expand(span.count, span.length)
    if span.start:
        _check_released(mask[:, : span.start])
        mask = mask[:, span.start :]
    if span.count > 1:
        return 0, mask
    # A window of one query is a slice, which needs no mask.
    first = mask.shape[1] - int(mask.sum())
    return (first, None) if bool(mask[0, first:].all()) else (0, mask)


def _group_mask(function: MaskFunction, group: DecodeGroup) -> Tensor:
    starts, lengths = (one[:, None, None, None] for one in (group.starts, group.lengths))
    index = torch.arange(max(group.released_max, group.tokens.shape[1]), device=starts.device)
    if group.released_max:
        released = index[: group.released_max]
        _check_released(_attends(function, lengths - 1, released) & (released < starts))
    held = starts + index[: group.tokens.shape[1]]
    return _attends(function, lengths - 1, held) & (held < lengths)


def _check_released(mask: Tensor) -> None:
    """Raise `RuntimeError` if a token attends to one of these, whose blocks were given up."""
    if bool(mask.any()):
        raise RuntimeError("a layer attends to tokens whose blocks have been released")


class MaskRange(NamedTuple):
    """A mask under which a token attends to all tokens from some first one up to itself.

    window: the most tokens, the own one included. chunk: only tokens of the same multiple of
    `chunk`. 0: no bound.
    """

    window: int = 0
    chunk: int = 0

    @property
    def lookback(self) -> int:
        """How many tokens before itself a token attends to at most."""
        return min(self.window or sys.maxsize, self.chunk or sys.maxsize) - 1

    def first(self, index: Tensor) -> Tensor:
        """Return the first token that each token attends to."""
        first = (index - self.window + 1).clamp(min=0) if self.window else index * 0
        return first.maximum(index // self.chunk * self.chunk) if self.chunk else first


class MaskRanges:
    """The ranges of a model's masks, each measured once, in sequences of up to `tokens` tokens.

    A model makes its mask functions anew in each pass; two are the same if their code and all that
    they refer to are.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens: Final = tokens
        self._index = torch.arange(tokens, device=device)
        self._known: dict[Hashable, MaskRange | None] = {}

    def of(self, function: MaskFunction) -> MaskRange:
        """Return the range of a mask; raises `TypeError` for one that is no window or chunk."""
        key = _identity(function)
        if key is None or key not in self._known:
            found = self._measure(function)
            if key is not None:
                self._known[key] = found
        else:
            found = self._known[key]
        if found is None:
            raise TypeError("a mask is neither a window nor a chunk of the tokens before")
        return found

    def _measure(self, function: MaskFunction) -> MaskRange | None:
        tokens = self.tokens
        lookback = _lookback(function, tokens, self._index.device)
        bounded = (MaskRange(window=lookback + 1), MaskRange(chunk=lookback + 1))
        candidates = (MaskRange(),) if lookback >= tokens - 1 else bounded
        return next((one for one in candidates if self._is_range(function, one)), None)

    def _is_range(self, function: MaskFunction, found: MaskRange) -> bool:
        """Return whether all tokens have this first one, and some of them no gap after it."""
        index, first = self._index, found.first(self._index)
        follows = _attends(function, index[1:], first[1:] - 1) & (first[1:] > 0)
        ends = (index, first), (index[1:], index[:-1].maximum(first[1:]))
        excluded = follows.any() | _attends(function, index[:-1], index[1:]).any()
        if bool(excluded) or not all(bool(_attends(function, *pair).all()) for pair in ends):
            return False
        return all(
            torch.equal(
                _attends(function, index[query], index).expand(len(index)),
                (index >= first[query]) & (index <= query),
            )
            for query in torch.linspace(0, len(index) - 1, _SAMPLES).long().tolist()
        )


def _identity(value: object) -> Hashable | None:
    """Return what a mask function depends on: code, numbers and functions; None if unknown.

    A tensor with one number has no data of single tokens, so it is the same in every pass.
    """
    if isinstance(value, Tensor):
        return (Tensor, tuple(value.shape)) if value.numel() == 1 else None
    if value is None or isinstance(value, bool | int | float | str):
        return (type(value), value)
    if isinstance(value, tuple | list):
        found = tuple(map(_identity, value))
        return None if None in found else found
    code = getattr(value, "__code__", None)
    if code is None:
        return None
    inner = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    parts = _identity([*inner, *(getattr(value, "__defaults__", None) or ())])
    return None if parts is None else (code, parts)


def _mask(
    *, mask_function: MaskFunction, use_vmap: bool = False, **_: Any
) -> SequenceMasks | MaskFunction:
    """The mask of the pass that runs, in place of a tensor over the whole batch."""
    if use_vmap:
        raise TypeError("the mask depends on more than the indices of tokens")
    step = _step.get().step
    return SequenceMasks(mask_function, step) if isinstance(step, GatheredStep) else mask_function


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return [1, tokens, heads, head_dim] for queries of [1, heads, tokens, head_dim].

    key: as the layer's cache returned it. Raises a `MODEL_CODE_ERRORS` if the model needs
    something that this function does not know.
    """
    del module
    step, ranges = _step.get()
    layer = step.layer_of(key)
    if options.get("position_bias") is not None:
        raise TypeError("the model adds a position bias")
    scoring = AttentionOptions(
        options.get("scaling"), options.get("softcap") or 0.0, options.get("s_aux")
    )
    output = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
    if isinstance(step, KernelStep):
        if not callable(attention_mask):
            raise TypeError("the model changes the attention mask")
        step.mask_functions.add(attention_mask)
        found = ranges.of(attention_mask)
        if min(found.lookback, ranges.tokens - 1) > step.lookback:
            raise RuntimeError("a layer attends to tokens whose blocks have been released")
        scoring = scoring._replace(window=found.window, chunk=found.chunk)
        step.kernel.attend(output, query[0], layer.keys, layer.values, step.blocks, scoring)
    elif not isinstance(attention_mask, SequenceMasks) or attention_mask.step is not step:
        raise TypeError("the model changes the attention mask")
    else:
        step.mask_functions.add(attention_mask.function)
        _attend_gathered(output, query, layer, attention_mask, scoring)
    return output[None], None


def _attend_gathered(
    output: Tensor,
    query: Tensor,
    layer: PagedLayer,
    masks: SequenceMasks,
    scoring: AttentionOptions,
) -> None:
    """Fill the output [tokens, heads, head_dim] by PyTorch's functions."""
    by_head = output.transpose(0, 1)[None]
    segments, others = None, masks.rows
    if query.is_cpu and not scoring.softcap and query.shape[3] == output.shape[2]:
        segments, others = masks.divided(layer.token_bytes)
    if segments is not None:
        output.index_copy_(0, segments.queries, _attend_segments(query, layer, segments, scoring))
    for span, first, mask in others:
        queries = query.narrow(2, span.begin, span.count)
        keys, values = layer.read(span, first)
        attended = _attend(queries, keys, values, mask, scoring)
        by_head.narrow(2, span.begin, span.count).copy_(attended)
    for group, mask in zip(masks.step.groups, masks.groups, strict=True):
        queries = query[0].index_select(1, group.queries).transpose(0, 1)[:, :, None]
        attended = _attend(queries, *layer.read_group(group), mask, scoring)[:, :, 0]
        output.index_copy_(0, group.queries, attended)


def _attend_segments(
    query: Tensor, layer: PagedLayer, segments: KVSegments, scoring: AttentionOptions
) -> Tensor:
    """Attend one query per row over its segments; return [rows, heads, head_dim].

    The output over all segments is the mean of those over each one, weighted by the sums of their
    exponentiated scores (Juravsky et al. 2024, "Hydragen", section 3.1).
    """
    queries = query[0].index_select(1, segments.queries)
    heads, rows, width = queries.shape
    found = []
    for segment, copied in zip(segments.segments, segments.copied, strict=True):
        keys, values = layer.read_tokens(segment.start, segment.tokens, copied)
        # The heads that share keys are queries of one head, so that nothing is repeated.
        packed = queries.narrow(1, segment.row, segment.rows).reshape(1, keys.shape[1], -1, width)
        output, logarithms = _attend_segment(packed, keys, values, scale=scoring.scale)
        shape = (heads, segment.rows, width)
        found.append((output.reshape(shape), logarithms.reshape(shape[:2])))
    outputs, logarithms = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    # The logarithms of the sums of each part; those of the sinks are one more part.
    sums = logarithms.new_full((heads, segments.parts + 1, rows), -torch.inf)
    sums.view(heads, -1).index_copy_(1, segments.places, logarithms)
    if scoring.sinks is not None:
        sums[:, -1] = scoring.sinks[:, None]
    weights = sums.softmax(1).view(heads, -1).index_select(1, segments.places)
    merged = logarithms.new_zeros(heads, rows, width)
    merged.index_add_(1, segments.rows, outputs * weights[:, :, None])
    return merged.transpose(0, 1).to(query.dtype)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: AttentionOptions
) -> Tensor:
    """Attend with PyTorch's function if it can; queries: [rows, heads, queries, head_dim]."""
    if scoring.softcap or scoring.sinks is not None:
        return _attend_explicitly(queries, keys, values, mask, scoring)
    rows, heads, count, width = queries.shape
    groups = keys.shape[1]
    if count == 1:
        # The heads that share keys are queries of one head, so that nothing is repeated.
        packed = queries.reshape(rows, groups, -1, width)
        attended = scaled_dot_product_attention(
            packed, keys, values, attn_mask=mask, scale=scoring.scale
        )
        return attended.reshape(rows, heads, 1, values.shape[3])
    return scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scoring.scale,
        enable_gqa=heads != groups,
    )


def _attend_explicitly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scoring: AttentionOptions,
) -> Tensor:
    """Attend with soft-capped scores or sinks."""
    scaling, softcap, sinks = scoring[:3]
    rows, heads, count, width = queries.shape
    packed = queries.reshape(rows, keys.shape[1], -1, width)
    scores = packed @ keys.transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    scores = scores.view(rows, heads, count, -1)
    if softcap:
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


AttentionInterface.register(PACKED, _attention)
AttentionMaskInterface.register(PACKED, _mask)


@contextmanager
def packed_attention(
    configs: list[PreTrainedConfig], step: PackedStep, ranges: MaskRanges
) -> Iterator[None]:
    """Let a model's attention be that of `step`.

    configs: the model's own, parents before their parts. ranges: of the model's masks.
    """
    token = _step.set(_Pass(step, ranges))
    try:
        with use_attention(configs, PACKED):
            yield
    finally:
        _step.reset(token)
