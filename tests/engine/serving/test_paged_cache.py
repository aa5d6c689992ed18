"""Which rows of a decode step share tokens, and the table that a device has of their blocks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from loradock.engine.serving.blocks import BLOCK_TOKENS, BlockPool, BlockTable, common_blocks
from loradock.engine.serving.paged_cache import DeviceBlockTable, find_shared


def tables_with(lists: list[list[int]]) -> list[BlockTable]:
    """Return tables with these blocks."""
    pool = BlockPool(1)
    tables = [BlockTable(pool, None) for _ in lists]
    for table, blocks in zip(tables, lists, strict=True):
        table.blocks.extend(blocks)
    return tables


@st.composite
def beginnings(draw: st.DrawFn) -> list[list[int]]:
    """The blocks of some sequences that begin with parts of others; each ends with one of its own.

    A block is named by the path to it, so that equal blocks have equal blocks before them.
    """
    lists: list[list[int]] = []
    for own in range(draw(st.integers(1, 12))):
        start = draw(st.sampled_from(lists))[:-1] if lists and draw(st.booleans()) else []
        kept = start[: draw(st.integers(0, len(start)))]
        added = range(draw(st.integers(1, 4)))
        lists.append([*kept, *(1000 * (own + 1) + number for number in added)])
    return lists


@given(lists=beginnings(), rows_max=st.integers(1, 4), tokens_min=st.sampled_from([0, 20, 50]))
def test_a_row_reads_what_it_shares_through_one_row_with_the_same_blocks(
    lists: list[list[int]], rows_max: int, tokens_min: int
) -> None:
    found = find_shared(tables_with(lists), rows_max, tokens_min)
    members = {row: [one for one in line[1:] if one >= 0] for row, line in enumerate(found)}
    assert sorted(one for group in members.values() for one in group) == [
        row for row, line in enumerate(found) if line[0]
    ]
    for row, group in members.items():
        tokens = found[row][0]
        assert len(found[row]) == 1 + rows_max
        assert not group or group[0] == row
        assert not group or (len(group) - 1) * tokens >= max(1, tokens_min)
        for one in group:
            assert found[one][0] == tokens
            blocks = tokens // BLOCK_TOKENS
            assert lists[one][:blocks] == lists[row][:blocks]
            assert blocks < len(lists[one])


@given(rows=st.integers(2, 20), blocks=st.integers(1, 5), rows_max=st.integers(2, 8))
def test_a_beginning_that_all_rows_have_is_read_once_for_as_many_as_possible(
    rows: int, blocks: int, rows_max: int
) -> None:
    lists = [[*range(blocks), 100 + row] for row in range(rows)]
    found = find_shared(tables_with(lists), rows_max, 0)
    readers = sum(line[1] >= 0 for line in found) + sum(not line[0] for line in found)
    assert readers == -(-rows // rows_max)


def test_rows_that_share_more_are_not_held_back_by_one_that_shares_less() -> None:
    lists = [[*range(9), 100], [*range(9), 101], [0, 200]]
    found = find_shared(tables_with(lists), 8, 0)
    assert [line[0] for line in found] == [9 * BLOCK_TOKENS, 9 * BLOCK_TOKENS, 0]


def test_released_blocks_are_shared_with_nobody() -> None:
    tables = tables_with([[5, 6], [5, 7]])
    tables[0].released = 1
    assert find_shared(tables, 2, 0) == [[0, -1, -1]] * 2


def test_the_device_table_sees_rows_that_got_other_blocks() -> None:
    pool = BlockPool(8)
    first, second = (BlockTable(pool, None) for _ in range(2))
    first.reserve(BLOCK_TOKENS)
    first.advance(BLOCK_TOKENS, list)
    second.reuse(first.prefix, ())
    for table in (first, second):
        table.reserve(BLOCK_TOKENS + 1)
    device = DeviceBlockTable(2, 4, 8, torch.device("cpu"))
    tables = [first, second]
    device.update(tables)
    shared = [[BLOCK_TOKENS, 0, 1], [BLOCK_TOKENS, -1, -1]]
    assert device.shared(tables, 2, 0) == shared
    assert device.shared([*tables], 2, 0) == shared
    second.vacate()
    second.reserve(BLOCK_TOKENS + 1)
    device.update(tables)
    assert device.shared(tables, 2, 0) == [[0, -1, -1]] * 2


@given(common=st.lists(st.integers(0, 99)), known=st.integers(0, 99))
def test_common_blocks_end_before_the_first_difference(common: list[int], known: int) -> None:
    for rest in ([100], []):
        found = common_blocks([*common, *rest], [*common, 200], min(known, len(common)))
        assert found == len(common)
