"""Segments: a sequence attends to each of its tokens once, and shared ones are read once."""

import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loradock.engine.serving import attention as module
from loradock.engine.serving.attention import (
    CALL_BYTES,
    COPY_TOKENS,
    KVSegment,
    KVSegments,
    SequencePlace,
)
from loradock.engine.serving.blocks import BLOCK_TOKENS

CALL_TOKENS = 64
TOKEN_BYTES = CALL_BYTES // CALL_TOKENS


def find_segments(
    rows: Sequence[SequencePlace], token_bytes: int = TOKEN_BYTES
) -> KVSegments | None:
    return module.find_segments(rows, token_bytes, torch.device("cpu"))


def tokens_of(row: SequencePlace) -> list[int]:
    """Return where a row's tokens are in the memory."""
    places = [block * BLOCK_TOKENS + at for block in row.blocks for at in range(BLOCK_TOKENS)]
    return places[row.first : row.first + row.tokens]


def read_by(found: KVSegments, number: int) -> list[int]:
    """Return where the row with a number in `found.queries` reads, segment by segment."""
    own = [one for one in found.segments if one.row <= number < one.row + one.rows]
    assert [one.part for one in own] == list(range(len(own)))
    return [at for one in own for at in tokens_in(one)]


def tokens_in(segment: KVSegment) -> list[int]:
    if not segment.blocks:
        return list(range(segment.start, segment.start + segment.tokens))
    assert segment.start // BLOCK_TOKENS == segment.blocks[0]
    copied = row_of(0, [*segment.blocks], segment.tokens, segment.start % BLOCK_TOKENS)
    return tokens_of(copied)


def row_of(query: int, blocks: list[int], tokens: int, first: int = 0) -> SequencePlace:
    is_copied = any(after != before + 1 for before, after in pairwise(blocks))
    return SequencePlace(query, blocks, first, tokens, is_copied)


def adjacent(query: int, start: int, blocks: int) -> SequencePlace:
    return row_of(query, [*range(start, start + blocks)], blocks * BLOCK_TOKENS - 3)


@st.composite
def rows_of_a_tree(draw: st.DrawFn) -> list[SequencePlace]:
    """Rows that begin with blocks of rows before them, and then have blocks of their own."""
    rows: list[SequencePlace] = []
    free = iter(draw(st.permutations(range(80))) if draw(st.booleans()) else range(1000))
    for query in range(draw(st.integers(1, 8))):
        blocks: list[int] = []
        if rows and draw(st.booleans()):
            parent = draw(st.sampled_from(rows))
            # The last block of a row is its own.
            blocks += parent.blocks[: draw(st.integers(0, len(parent.blocks) - 1))]
        blocks += [next(free) for _ in range(draw(st.integers(1, 5)))]
        first = draw(st.integers(0, BLOCK_TOKENS - 1)) if draw(st.booleans()) else 0
        end = len(blocks) * BLOCK_TOKENS - draw(st.integers(0, BLOCK_TOKENS - 1 - first))
        rows.append(row_of(query, blocks, max(1, end - first), first))
    return rows


@pytest.mark.parametrize("token_bytes", [TOKEN_BYTES, 3 * TOKEN_BYTES, 1000 * TOKEN_BYTES])
@given(rows=rows_of_a_tree())
def test_the_pieces_of_a_row_are_its_tokens_in_order(
    token_bytes: int, rows: list[SequencePlace]
) -> None:
    found = find_segments(rows, token_bytes)
    if found is None:
        return
    queries = found.queries.tolist()
    assert len(set(queries)) == len(queries)
    for number, query in enumerate(queries):
        assert read_by(found, number) == tokens_of(rows[query])
    outputs = [(n, one.part) for one in found.segments for n in range(one.row, one.row + one.rows)]
    assert found.rows.tolist() == [number for number, _ in outputs]
    assert found.places.tolist() == [part * len(queries) + number for number, part in outputs]
    assert found.parts == 1 + max(part for _, part in outputs)


def test_rows_with_adjacent_blocks_of_their_own_are_in_no_pieces() -> None:
    rows = [adjacent(0, 0, 30), adjacent(1, 30, 20), adjacent(2, 60, 1)]
    assert find_segments(rows) is None


def test_a_shared_prefix_is_one_piece_and_its_branches_too() -> None:
    """Three rows share 20 blocks, and two of these 10 more."""
    stem, branch = range(20), range(100, 110)
    rows = [
        row_of(0, [*stem, *branch, 40], 31 * BLOCK_TOKENS),
        row_of(1, [*stem, 50, 51], 22 * BLOCK_TOKENS - 5),
        row_of(2, [*stem, *branch, 60, 61], 31 * BLOCK_TOKENS + 1),
        adjacent(3, 200, 9),
    ]
    found = find_segments(rows)
    assert found is not None
    assert found.queries.tolist() == [1, 0, 2]
    assert list(found.segments) == [
        KVSegment(0, 20 * BLOCK_TOKENS, 0, 3, 0),
        KVSegment(50 * BLOCK_TOKENS, 2 * BLOCK_TOKENS - 5, 0, 1, 1),
        KVSegment(100 * BLOCK_TOKENS, 10 * BLOCK_TOKENS, 1, 2, 1),
        KVSegment(40 * BLOCK_TOKENS, BLOCK_TOKENS, 1, 1, 2),
        KVSegment(60 * BLOCK_TOKENS, BLOCK_TOKENS + 1, 2, 1, 2),
    ]


def test_the_cost_of_calls_decides_between_pieces_and_copies() -> None:
    def row_of_runs(runs: int, blocks: int) -> SequencePlace:
        numbers = [100 * run + at for run in range(runs) for at in range(blocks)]
        return row_of(0, numbers, len(numbers) * BLOCK_TOKENS)

    assert find_segments([row_of_runs(2, 8)]) is not None
    assert find_segments([row_of_runs(2, 2)]) is None
    assert find_segments([row_of_runs(20, 4)]) is None
    pair = [adjacent(0, 0, 10), row_of(1, [0, 1, 40], 3 * BLOCK_TOKENS)]
    # A common beginning of 2 blocks is copied rather than read in a call more.
    assert find_segments(pair) is None
    many = [*pair, *(row_of(n, [0, 1, 50 + 2 * n], 3 * BLOCK_TOKENS) for n in range(2, 9))]
    found = find_segments(many)
    assert found is not None
    assert found.segments[0] == KVSegment(0, 2 * BLOCK_TOKENS, 0, 9, 0)


def test_scattered_blocks_that_rows_share_are_copied_once() -> None:
    stem = [*range(0, 200, 2), *range(300, 320), *range(400, 500, 2)]
    rows = [row_of(n, [*stem, 600 + 5 * n], len(stem) * BLOCK_TOKENS + 1) for n in range(4)]
    found = find_segments(rows)
    assert found is not None
    shared = [one for one in found.segments if one.rows == 4]
    assert [list(one.blocks) for one in shared] == [stem[:100], [], stem[120:]]
    assert shared[1] == KVSegment(300 * BLOCK_TOKENS, 20 * BLOCK_TOKENS, 0, 4, 1)
    assert len(found.segments) == 3 + 4
    copied = [None if one is None else one.tolist() for one in found.copied]
    assert copied == [list(one.blocks) or None for one in found.segments]


def test_as_many_branches_follow_each_other_as_there_are_rows() -> None:
    """Each row begins with all blocks of the row before but the last one."""
    rows = [
        row_of(number, [*range(number), 10_000 + number], (number + 1) * BLOCK_TOKENS)
        for number in range(1, sys.getrecursionlimit() + 2)
    ]
    found = find_segments(rows, token_bytes=1)
    assert found is not None
    assert read_by(found, len(rows) - 1) == tokens_of(rows[found.queries.tolist()[-1] - 1])


def test_short_runs_of_small_tokens_are_copied() -> None:
    """As in layers with one head of keys, where a call takes as long as reading more tokens."""
    blocks = [100 * run + at for run in range(4) for at in range(10)]
    row = row_of(0, blocks, len(blocks) * BLOCK_TOKENS)
    assert find_segments([row]) is not None
    assert find_segments([row], TOKEN_BYTES // 10) is None


@given(rows=rows_of_a_tree())
def test_pieces_are_chosen_only_where_they_cost_less(rows: list[SequencePlace]) -> None:
    found = find_segments(rows)
    if found is None:
        return
    chosen = [rows[query] for query in found.queries.tolist()]

    def cost(calls: int, read: int, copied: int) -> float:
        return CALL_TOKENS * calls + read + COPY_TOKENS * copied

    before = cost(
        len(chosen),
        sum(row.tokens for row in chosen),
        sum(row.tokens for row in chosen if row.is_copied),
    )
    after = cost(
        len(found.segments),
        sum(one.tokens for one in found.segments),
        sum(one.tokens for one in found.segments if one.blocks),
    )
    assert after < before
