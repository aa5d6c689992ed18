"""What the rows of a flat pass attend to: the model's own mask functions over each row's tokens.

Windows and chunks come from the mask that the model requests: the function that it would expand
over a batch is evaluated over the indices of one row.
"""

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.models.library.names import causal_mask_function
from loradock.engine.paging.block_pool import BLOCK_TOKENS
from loradock.engine.paging.paged_cache import DecodeGroup, FlatStep, MaskFunction, RowSpan
from loradock.engine.paging.pieces import Pieces, RowPlace, find_pieces

_SAMPLES: Final = 16
"""The tokens of the longest row whose masks are looked at whole, for gaps."""


class RowMask(NamedTuple):
    """What a row attends to: of the tokens that it holds, those from `first` on, counted from 0.

    mask: [queries, tokens] bool, from `first` on. None: all up to each query's own token.
    """

    span: RowSpan
    first: int
    mask: Tensor | None


class RowMasks:
    """The mask of some layers in one pass, evaluated when the first of them attends.

    Some models request masks that none of their layers uses.
    """

    def __init__(self, function: MaskFunction, step: FlatStep) -> None:
        self.function: Final = function
        self.step: Final = step
        # By the bytes of a token, which may differ among layers.
        self._divided: dict[int, tuple[Pieces | None, list[RowMask]]] = {}

    @cached_property
    def rows(self) -> list[RowMask]:
        """The masks of the step's spans.

        Raises `RuntimeError` where a token that the row has given up is attended to.
        """
        device = self.step.written.device
        return [RowMask(span, *_row_mask(self.function, span, device)) for span in self.step.spans]

    def divided(self, token_bytes: int) -> tuple[Pieces | None, list[RowMask]]:
        """Return the pieces of rows of one query that share or copy blocks, and the other rows.

        token_bytes: of one token's keys and values in the layer that attends.
        """
        if token_bytes not in self._divided:
            self._divided[token_bytes] = self._divide(token_bytes)
        return self._divided[token_bytes]

    def _divide(self, token_bytes: int) -> tuple[Pieces | None, list[RowMask]]:
        places = [
            RowPlace(
                span.begin,
                span.blocks[first // BLOCK_TOKENS :],
                first % BLOCK_TOKENS,
                span.held - first,
                span.numbers is not None,
            )
            for span, first, mask in self.rows
            if span.count == 1 and mask is None
        ]
        pieces = find_pieces(places, token_bytes, self.step.written.device)
        if pieces is None:
            return None, self.rows
        chosen = set(pieces.queries.tolist())
        return pieces, [row for row in self.rows if row.span.begin not in chosen]

    @cached_property
    def groups(self) -> list[Tensor]:
        """The masks of the step's groups, each [rows, 1, 1, width] bool; raises as `rows` does."""
        return [_group_mask(self.function, group) for group in self.step.groups]


def longest_reach(functions: Iterable[MaskFunction], tokens: int, device: torch.device) -> int:
    """Return how many tokens before itself a token attends to, at most, under all these masks.

    tokens: those of the longest row. The result is at least 1. It is `tokens - 1` or more, so that
    it excludes nothing, where one of the masks has no bound, or gaps.
    """
    return max((_reach(function, tokens, device) for function in functions), default=tokens)


def _reach(function: MaskFunction, tokens: int, device: torch.device) -> int:
    """Return the largest distance at which a token attends to another; more where that is unknown.

    Bisection finds it where each token attends to all those from some first one on, as under
    windows and chunks: no distance above it has any. Masks with gaps are looked for in samples.
    """
    index = torch.arange(tokens, device=device)

    def is_beyond(distance: int) -> bool:
        return not bool(_attends(function, index[distance:], index[: tokens - distance]).any())

    reach = max(1, bisect_left(range(1, tokens), True, key=is_beyond))
    for query in torch.linspace(0, tokens - 1, _SAMPLES).long().tolist():
        if bool(_attends(function, index[query], index[: max(0, query - reach)]).any()):
            return tokens
    return reach


def _attends(function: MaskFunction, queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether tokens attend to others of their row; the indices broadcast."""
    zero = torch.zeros((), dtype=torch.int64, device=queries.device)
    return function(zero, zero, queries, keys)


def _row_mask(
    function: MaskFunction, span: RowSpan, device: torch.device
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
    """Raise `RuntimeError` if a token attends to one of these, which its row has given up."""
    if bool(mask.any()):
        raise RuntimeError("a layer attends to tokens whose blocks have been released")
