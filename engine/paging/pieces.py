"""Pieces of the memory in which rows of one query read keys and values; shared ones are read once.

A row that began with the blocks of others is in several places of the memory. It attends to each
piece, and what it finds there is merged, so that it is not copied whole. Rows that began with the
same blocks attend to these together, in one call.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.paging.block_pool import BLOCK_TOKENS

CALL_BYTES: Final = 384 << 10
"""The bytes of keys and values whose reading takes as long as a further call.

Measured with 12 heads of 64 in float32: 25 us per call, and 0.4 us for the 6 KiB of a token.
"""

COPY_TOKENS: Final = 0.5
"""The tokens whose reading takes as long as copying one."""


class RowPlace(NamedTuple):
    """Where a row is: its query in the pass, and `tokens` tokens from `first` on in its blocks.

    Its last block is in no other row. `is_copied`: whether it would be copied to be read alone.
    """

    query: int
    blocks: list[int]
    first: int
    tokens: int
    is_copied: bool


class Piece(NamedTuple):
    """Some tokens of a row, to which other rows attend too: `tokens` from `start` in the memory.

    The rows are `rows` of `Pieces.queries` from `row` on. `part`: how many pieces each of them has
    before this one. `blocks`: those of the tokens, if they are not adjacent and have to be copied.
    """

    start: int
    tokens: int
    row: int
    rows: int
    part: int
    blocks: Sequence[int] = ()


class Pieces(NamedTuple):
    """The pieces of several rows, each with its part of these rows' outputs.

    Tensors are int64 on the device. queries: [rows], of the pass. parts: the most pieces of a row.
    rows: [outputs], the row of each output, in the order of `pieces`. places: [outputs], its place
    in a table of [parts, rows]. copied: for each piece its blocks, or None.
    """

    queries: Tensor
    parts: int
    pieces: Sequence[Piece]
    rows: Tensor
    places: Tensor
    copied: Sequence[Tensor | None]


def find_pieces(
    places: Sequence[RowPlace], token_bytes: int, device: torch.device
) -> Pieces | None:
    """Return the pieces of the rows for which they take less time; None if there are no such rows.

    The others are read one by one, and copied where their blocks are not adjacent. token_bytes: of
    one token's keys and values.
    """
    call_tokens = CALL_BYTES / token_bytes
    chosen: list[RowPlace] = []
    pieces: list[Piece] = []
    places = sorted(places, key=lambda one: (one.first, one.blocks))
    for _, found in groupby(places, key=lambda one: (one.first, one.blocks[0])):
        group = tuple(found)
        if len(group) == 1 and not group[0].is_copied:
            continue
        own = list(_pieces_of(group, len(chosen), call_tokens))
        read = sum(_cost(piece.tokens, bool(piece.blocks)) for piece in own)
        alone = sum(_cost(row.tokens, row.is_copied) for row in group)
        if read + call_tokens * (len(own) - len(group)) < alone:
            chosen += group
            pieces += own
    return _with_tensors(chosen, pieces, device) if pieces else None


def _cost(tokens: int, is_copied: bool) -> float:
    """Return the tokens whose reading takes as long as reading these, without the call."""
    return tokens * (1 + COPY_TOKENS * is_copied)


def _pieces_of(rows: Sequence[RowPlace], number: int, call_tokens: float) -> Iterator[Piece]:
    """Yield the pieces of sorted rows, the first of which has this number.

    call_tokens: those whose reading takes as long as a call.
    """
    # Rows that have `begin` blocks in common, the first one's number, and their pieces so far.
    # There is no recursion, because a branch may divide for each of the rows.
    pending = [(rows, 0, number, 0)]
    while pending:
        group, begin, row, part = pending.pop()
        end, is_end = _common(group, begin)
        if is_end or (len(group) - 1) * (end - begin) * BLOCK_TOKENS >= call_tokens:
            for start, tokens, blocks in _reads(group[0], begin, end, call_tokens):
                yield Piece(start, tokens, row, len(group), part, blocks)
                part += 1
            begin = end
        if not is_end:
            branches = _branches(group, row, end)
            pending += ((branch, begin, first, part) for branch, first in reversed(branches))


def _branches(
    rows: Sequence[RowPlace], number: int, same: int
) -> list[tuple[Sequence[RowPlace], int]]:
    """Divide sorted rows by their block after `same` blocks; return each part and its number."""
    parts = [tuple(found) for _, found in groupby(rows, lambda one: one.blocks[same : same + 1])]
    return list(zip(parts, accumulate(map(len, parts), initial=number), strict=False))


def _common(rows: Sequence[RowPlace], begin: int) -> tuple[int, bool]:
    """Return how many blocks sorted rows have in common, at least `begin`; whether it is all."""
    first, last = rows[0].blocks, rows[-1].blocks
    same, most = begin, min(len(first), len(last))
    while same < most:
        middle = (same + most + 1) // 2
        if first[same:middle] == last[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same, same == len(last)


def _reads(
    row: RowPlace, begin: int, end: int, call_tokens: float
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yield the pieces of a row's blocks from `begin` to `end`: start, tokens, copied blocks.

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
    chosen: Sequence[RowPlace], pieces: Sequence[Piece], device: torch.device
) -> Pieces:
    queries = torch.tensor([row.query for row in chosen], device=device)
    outputs = [
        (row, piece.part * len(chosen) + row)
        for piece in pieces
        for row in range(piece.row, piece.row + piece.rows)
    ]
    rows, places = torch.tensor(outputs, device=device).unbind(1)
    copied = [
        torch.tensor(piece.blocks, device=device) if piece.blocks else None for piece in pieces
    ]
    return Pieces(queries, 1 + max(piece.part for piece in pieces), pieces, rows, places, copied)
