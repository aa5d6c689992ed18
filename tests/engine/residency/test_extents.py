"""Properties of extents: disjoint, adding up, and holes made with the fewest bytes moved, whole."""

from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.residency.extents import Compactor, Extent, Extents, Move
from tests.support.engine.arena_examples import CopyFailedError, ManualCopier

UNIT = 128
MEMORY_BYTES = 600
LAYOUTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=7)


def laid_out(gaps_and_sizes: list[tuple[int, int]], tail: int) -> Extents:
    """Return extents with these holes before them, built by allocating and freeing."""
    capacity = sum(gap + size for gap, size in gaps_and_sizes) + tail
    extents = Extents(capacity * UNIT)
    fillers = []
    for number, (gap, size) in enumerate(gaps_and_sizes):
        if gap:
            fillers.append(100 + number)
            assert extents.allocate(fillers[-1], gap * UNIT)
        assert extents.allocate(number, size * UNIT)
    for filler in fillers:
        extents.free(filler)
    return extents


def holes(extents: Extents, owners: list[int]) -> list[int]:
    """Return the sizes of the holes between these owners, in bytes."""
    found, end = [], 0
    for extent in sorted((extents[owner] for owner in owners), key=lambda e: e.start_bytes):
        found.append(extent.start_bytes - end)
        end = extent.end_bytes
    return [*found, extents.capacity_bytes - end]


def cheapest(
    extents: Extents, owners: list[int], size_bytes: int, unmovable: set[int]
) -> int | None:
    """Return the fewest bytes that must move for such a hole, by trying every run of neighbours."""
    costs = []
    for first, end in combinations(range(len(owners) + 1), 2):
        run = owners[first:end]
        if unmovable.intersection(run):
            continue
        start_bytes = extents[owners[first - 1]].end_bytes if first else 0
        end_bytes = extents.capacity_bytes
        if end < len(owners):
            end_bytes = extents[owners[end]].start_bytes
        taken = sum(extents[owner].size_bytes for owner in run)
        if end_bytes - start_bytes - taken >= size_bytes:
            costs.append(taken)
    return min(costs, default=None)


@settings(max_examples=400)
@given(LAYOUTS, st.integers(0, 3), st.integers(1, 12), st.sets(st.integers(0, 6)))
def test_a_plan_makes_the_hole_with_the_fewest_bytes(
    layout: list[tuple[int, int]], tail: int, size: int, unmovable: set[int]
) -> None:
    extents, owners, size_bytes = laid_out(layout, tail), list(range(len(layout))), size * UNIT
    before = {owner: extents[owner] for owner in owners}
    fits_already = max(holes(extents, owners)) >= size_bytes
    wanted = cheapest(extents, owners, size_bytes, unmovable)
    plan = extents.plan(size_bytes, unmovable)
    if plan is None:
        assert wanted is None
        assert unmovable or size_bytes > extents.free_bytes
        return
    if not fits_already:
        assert wanted == sum(before[move.owner].size_bytes for move in plan)
    for move in plan:
        assert move.owner not in unmovable
        assert move.start_bytes < extents[move.owner].start_bytes
        extents.apply(move)
        extents.check()
    assert max(holes(extents, owners)) >= size_bytes
    assert extents.allocate(99, size_bytes) is not None
    extents.check()


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    extents = laid_out([(3, 1), (2, 1), (4, 1)], tail=9)
    assert extents.allocate(50, 2 * UNIT) == Extent(4 * UNIT, 2 * UNIT)
    assert extents.allocate(51, 4 * UNIT) == Extent(7 * UNIT, 4 * UNIT)
    assert extents.allocate(52, 10 * UNIT) is None


def test_check_finds_an_overlap() -> None:
    extents = laid_out([(2, 2), (0, 2)], tail=0)
    extents.check()
    extents.apply(Move(1, 3 * UNIT))
    try:
        extents.check()
    except AssertionError:
        return
    raise AssertionError("an overlap was not found")


def make_compactor(
    memory: torch.Tensor, extents: Extents, bounce_bytes: int, failing_moves: range = range(0)
) -> Compactor:
    copier = ManualCopier(failing_moves=failing_moves)
    with patch("loradock.engine.residency.extents._BOUNCE_BYTES_MAX", bounce_bytes):
        return Compactor(memory, extents, copier)


def distinct_bytes(size_bytes: int) -> torch.Tensor:
    return (torch.arange(size_bytes) % 251).to(torch.uint8)


@settings(max_examples=300)
@given(
    target=st.integers(0, 200),
    distance=st.integers(1, 200),
    size=st.integers(1, 200),
    bounce_bytes=st.sampled_from([1, 7, 64, 256]),
)
def test_a_slide_moves_all_bytes_and_touches_no_others(
    target: int, distance: int, size: int, bounce_bytes: int
) -> None:
    source = target + distance
    memory = distinct_bytes(MEMORY_BYTES)
    before = memory.clone()
    make_compactor(memory, Extents(MEMORY_BYTES), bounce_bytes).slide(source, target, size)
    assert torch.equal(memory[target : target + size], before[source : source + size])
    assert torch.equal(memory[:target], before[:target])
    assert torch.equal(memory[source + size :], before[source + size :])


@pytest.mark.parametrize("failing_move", range(5))
def test_a_move_that_fails_raises(failing_move: int) -> None:
    compactor = make_compactor(
        *(distinct_bytes(MEMORY_BYTES), Extents(MEMORY_BYTES), 8),
        range(failing_move, failing_move + 1),
    )
    with pytest.raises(CopyFailedError):
        compactor.slide(source=110, target=105, size=20)


def fragmented() -> Extents:
    """Return extents 0 to 3 of one unit each, with a hole of one unit before each."""
    extents = Extents(8 * UNIT)
    for owner in range(4):
        extents.allocate(100 + owner, UNIT)
        extents.allocate(owner, UNIT)
    for owner in range(4):
        extents.free(100 + owner)
    return extents


def test_a_hole_is_made_without_moving_a_fixed_extent() -> None:
    memory, extents = distinct_bytes(8 * UNIT), fragmented()
    before = memory.clone()
    moved = make_compactor(memory, extents, 64).make_hole(2 * UNIT, unmovable=[0, 1])
    assert moved == [2]
    assert extents[2] == Extent(4 * UNIT, UNIT)
    assert torch.equal(memory[4 * UNIT : 5 * UNIT], before[5 * UNIT : 6 * UNIT])
    extents.check()


def test_nothing_moves_where_the_hole_would_take_a_fixed_extent() -> None:
    memory, extents = distinct_bytes(8 * UNIT), fragmented()
    before = memory.clone()
    compactor = make_compactor(memory, extents, 64)
    assert compactor.make_hole(4 * UNIT, unmovable=[2]) is None
    starts = [extents[owner].start_bytes for owner in range(4)]
    assert starts == [UNIT, 3 * UNIT, 5 * UNIT, 7 * UNIT]
    assert torch.equal(memory, before)
    assert compactor.make_hole(4 * UNIT, unmovable=()) == [0, 1, 2]
