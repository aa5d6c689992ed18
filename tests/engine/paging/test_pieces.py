"""Pieces of rows that share blocks: they cover each row once, and take less time than copies."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.paging import pieces as module
from engine.paging.block_pool import BLOCK_TOKENS
from engine.paging.pieces import CALL_TOKENS, Piece, Pieces, RowPlace, find_pieces

CPU = torch.device("cpu")


def tokens_of(row: RowPlace) -> list[int]:
    """Return where a row's tokens are in the memory."""
    places = [block * BLOCK_TOKENS + at for block in row.blocks for at in range(BLOCK_TOKENS)]
    return places[row.first : row.first + row.tokens]


def read_by(found: Pieces, number: int) -> list[int]:
    """Return where the row with a number in `found.queries` reads, piece by piece."""
    own = [one for one in found.pieces if one.row <= number < one.row + one.rows]
    assert [one.part for one in own] == list(range(len(own)))
    return [at for one in own for at in range(one.start, one.start + one.tokens)]


def adjacent(query: int, start: int, blocks: int) -> RowPlace:
    return RowPlace(query, [*range(start, start + blocks)], 0, blocks * BLOCK_TOKENS - 3)


@st.composite
def rows_of_a_tree(draw: st.DrawFn) -> list[RowPlace]:
    """Rows that begin with blocks of rows before them, and then have blocks of their own."""
    rows: list[RowPlace] = []
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
        rows.append(RowPlace(query, blocks, first, max(1, end - first)))
    return rows


@pytest.mark.parametrize("call_tokens", [0, 20, CALL_TOKENS])
@given(rows=rows_of_a_tree())
def test_the_pieces_of_a_row_are_its_tokens_in_order(
    call_tokens: int, rows: list[RowPlace]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CALL_TOKENS", call_tokens)
        found = find_pieces(rows, CPU)
    if found is None:
        return
    queries = found.queries.tolist()
    assert len(set(queries)) == len(queries)
    for number, query in enumerate(queries):
        assert read_by(found, number) == tokens_of(rows[query])
    outputs = [(n, one.part) for one in found.pieces for n in range(one.row, one.row + one.rows)]
    assert found.rows.tolist() == [number for number, _ in outputs]
    assert found.places.tolist() == [part * len(queries) + number for number, part in outputs]
    assert found.parts == 1 + max(part for _, part in outputs)


def test_rows_with_adjacent_blocks_of_their_own_are_in_no_pieces() -> None:
    rows = [adjacent(0, 0, 30), adjacent(1, 30, 20), adjacent(2, 60, 1)]
    assert find_pieces(rows, CPU) is None


def test_a_shared_prefix_is_one_piece_and_its_branches_too() -> None:
    """Three rows share 20 blocks, and two of these 10 more."""
    stem, branch = range(20), range(100, 110)
    rows = [
        RowPlace(0, [*stem, *branch, 40], 0, 31 * BLOCK_TOKENS),
        RowPlace(1, [*stem, 50, 51], 0, 22 * BLOCK_TOKENS - 5),
        RowPlace(2, [*stem, *branch, 60, 61], 0, 31 * BLOCK_TOKENS + 1),
        adjacent(3, 200, 9),
    ]
    found = find_pieces(rows, CPU)
    assert found is not None
    assert found.queries.tolist() == [1, 0, 2]
    assert list(found.pieces) == [
        Piece(0, 20 * BLOCK_TOKENS, 0, 3, 0),
        Piece(50 * BLOCK_TOKENS, 2 * BLOCK_TOKENS - 5, 0, 1, 1),
        Piece(100 * BLOCK_TOKENS, 10 * BLOCK_TOKENS, 1, 2, 1),
        Piece(40 * BLOCK_TOKENS, BLOCK_TOKENS, 1, 1, 2),
        Piece(60 * BLOCK_TOKENS, BLOCK_TOKENS + 1, 2, 1, 2),
    ]


def test_the_cost_of_calls_decides_between_pieces_and_copies() -> None:
    def row_of(runs: int, blocks: int) -> RowPlace:
        numbers = [100 * run + at for run in range(runs) for at in range(blocks)]
        return RowPlace(0, numbers, 0, len(numbers) * BLOCK_TOKENS)

    assert find_pieces([row_of(2, 8)], CPU) is not None
    assert find_pieces([row_of(2, 2)], CPU) is None
    assert find_pieces([row_of(20, 4)], CPU) is None
    pair = [adjacent(0, 0, 10), RowPlace(1, [0, 1, 40], 0, 3 * BLOCK_TOKENS)]
    # A common beginning of 2 blocks is copied rather than read in a call more.
    assert find_pieces(pair, CPU) is None
    many = [*pair, *(RowPlace(n, [0, 1, 50 + 2 * n], 0, 3 * BLOCK_TOKENS) for n in range(2, 9))]
    found = find_pieces(many, CPU)
    assert found is not None
    assert found.pieces[0] == Piece(0, 2 * BLOCK_TOKENS, 0, 9, 0)


@given(rows=rows_of_a_tree())
def test_pieces_are_chosen_only_where_they_cost_less(rows: list[RowPlace]) -> None:
    found = find_pieces(rows, CPU)
    if found is None:
        return
    chosen = [rows[query] for query in found.queries.tolist()]
    read = sum(row.tokens for row in chosen)
    copied = sum(row.tokens for row in chosen if any(b != a + 1 for a, b in pairwise(row.blocks)))
    before = read + module.COPY_TOKENS * copied + CALL_TOKENS * len(chosen)
    after = sum(one.tokens for one in found.pieces) + CALL_TOKENS * len(found.pieces)
    assert after < before
