"""The groups of a batch: each row with an adapter once, at offsets that the bounds determine."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loradock.engine.kernels.operands import TILE_ROWS, GroupBounds, Groups
from loradock.engine.punica.grouping import Grouper
from tests.support.engine.table_kernels import use_fixed_tables

CPU = torch.device("cpu")
SLOTS = 9

slots_of_rows = st.lists(st.integers(-1, SLOTS - 1), max_size=300)


def group(rows: list[int], prompts: list[int], specialize_active: bool = False):
    grouper = Grouper(CPU, 16, specialize_active)
    as_slots = [torch.tensor(slots, dtype=torch.int64) for slots in (rows, prompts)]
    return grouper.group(*as_slots, SLOTS)


def rows_by_tile(groups: Groups, table: torch.Tensor) -> list[tuple[int, int]]:
    """Return (slot, row) of every row in a table's tiles, in order."""
    return [
        (slot, int(groups.rows[index]))
        for slot, first, count in table.tolist()
        for index in range(first, first + count)
    ]


@given(rows=slots_of_rows, prompts=slots_of_rows)
def test_tiles_hold_every_row_with_an_adapter_once_and_no_base_row(rows, prompts) -> None:
    for groups, slots in zip(group(rows, prompts), (rows, prompts), strict=True):
        own = sorted((slot, row) for row, slot in enumerate(slots) if slot >= 0)
        assert [span.slot for span in groups.spans] == sorted({slot for slot, _ in own})
        assert [tiles.block_m for tiles in groups.tiles] == list(TILE_ROWS)
        for tiles in groups.tiles:
            assert len(tiles.table) == groups.bounds.max_tiles(tiles.block_m)
            assert rows_by_tile(groups, tiles.table) == own
            counts = tiles.table[:, 2]
            assert (counts <= tiles.block_m).all()
            # A program without rows ends its launch's work, so all tiles with rows must come first.
            assert sorted(counts.bool().tolist(), reverse=True) == counts.bool().tolist()


@given(rows=slots_of_rows)
def test_bounds_depend_on_the_batch_shape_and_the_slots_alone(rows) -> None:
    bounds = group(rows, []).tokens.bounds
    assert bounds == group([-1] * len(rows), []).tokens.bounds
    assert bounds.tokens >= len(rows)
    assert bounds.tokens & (bounds.tokens - 1) == 0
    assert bounds.groups == min(SLOTS, bounds.tokens)


@given(rows=slots_of_rows)
def test_specialized_bounds_are_powers_of_two_of_the_active_adapters(rows) -> None:
    bounds = group(rows, [], specialize_active=True).tokens.bounds
    active = len(set(rows) - {-1})
    assert max(1, active) <= bounds.groups <= max(1, 2 * active - 1)
    assert bounds.groups in (1, 2, 4, 8, SLOTS)


@given(rows=st.lists(st.integers(-1, SLOTS - 1), min_size=60, max_size=60), other=slots_of_rows)
def test_batches_with_equal_bounds_have_tables_at_equal_offsets(rows, other) -> None:
    first, second = group(rows, other), group(rows[::-1], other[::-1])
    for one, two in zip(first, second, strict=True):
        assert one.bounds == two.bounds
        for table, same in zip(tables(one), tables(two), strict=True):
            assert table.storage_offset() == same.storage_offset()


def tables(groups: Groups) -> list[torch.Tensor]:
    return [groups.rows, groups.token_slots, *[tiles.table for tiles in groups.tiles]]


def test_the_bound_on_tiles_is_tight() -> None:
    for counts in ([17, 1, 1], [16, 16], [1], [33, 1, 64, 64], [1] * SLOTS):
        rows = [slot for slot, count in enumerate(counts) for _ in range(count)]
        for block_m in TILE_ROWS:
            needed = sum(-(-count // block_m) for count in counts)
            assert needed <= GroupBounds(len(rows), len(counts), 16).max_tiles(block_m)
    assert GroupBounds(8, 8, 16).max_tiles(16) == 8
    assert GroupBounds(64, 1, 16).max_tiles(64) == 1
    assert GroupBounds(18, 2, 16).max_tiles(16) == 3


def test_fixed_tables_have_another_identity_once_they_have_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grouper = Grouper(CPU, 16)
    use_fixed_tables(grouper, monkeypatch, words=24)
    # All batches are kept, so that no address is used again.
    batches, identities = [], []
    for rows in (1, 2, 40, 3, 40, 900, 1):
        slots = torch.arange(rows) % SLOTS
        batches.append(grouper.group(slots, slots, SLOTS))
        assert rows_by_tile(batches[-1].tokens, batches[-1].tokens.tiles[0].table) == sorted(
            zip(slots.tolist(), range(rows), strict=True)
        )
        identities.append(grouper.buffer_identity)
    places = [batch.tokens.rows.untyped_storage().data_ptr() for batch in batches]
    for one, place in zip(identities, places, strict=True):
        for other, elsewhere in zip(identities, places, strict=True):
            assert (one is other) == (place == elsewhere)
    assert len(set(places)) > 2
