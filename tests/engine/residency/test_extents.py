"""Properties of the extents: disjoint, adding up, and holes made with the fewest bytes moved."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.residency.extents import Extent, Extents, Move

UNIT = 128
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
