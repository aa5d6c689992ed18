"""Laws of the extents: apart, adding up, and room made with the fewest bytes moved."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.residency.extents import Extent, Extents, Move

UNIT = 128
LAYOUTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=7)


def laid_out(gaps_and_sizes: list[tuple[int, int]], tail: int) -> Extents:
    """Extents with these holes before them, built the way the arena does: placed, then dropped."""
    capacity = sum(gap + size for gap, size in gaps_and_sizes) + tail
    extents = Extents(capacity * UNIT)
    fillers = []
    for number, (gap, size) in enumerate(gaps_and_sizes):
        if gap:
            fillers.append(100 + number)
            assert extents.place(fillers[-1], gap * UNIT)
        assert extents.place(number, size * UNIT)
    for filler in fillers:
        extents.drop(filler)
    return extents


def holes(extents: Extents, owners: list[int]) -> list[int]:
    """The sizes of the holes between these owners, in bytes."""
    found, end = [], 0
    for extent in sorted((extents[owner] for owner in owners), key=lambda e: e.start_bytes):
        found.append(extent.start_bytes - end)
        end = extent.end_bytes
    return [*found, extents.capacity_bytes - end]


def cheapest(extents: Extents, owners: list[int], size_bytes: int, fixed: set[int]) -> int | None:
    """By trying every run of neighbours: the fewest bytes that must move for such a hole."""
    costs = []
    for first, behind in combinations(range(len(owners) + 1), 2):
        run = owners[first:behind]
        if fixed.intersection(run):
            continue
        start = extents[owners[first - 1]].end_bytes if first else 0
        end = extents[owners[behind]].start_bytes if behind < len(owners) else None
        end = extents.capacity_bytes if end is None else end
        taken = sum(extents[owner].size_bytes for owner in run)
        if end - start - taken >= size_bytes:
            costs.append(taken)
    return min(costs, default=None)


@settings(max_examples=400, deadline=None)
@given(LAYOUTS, st.integers(0, 3), st.integers(1, 12), st.sets(st.integers(0, 6)))
def test_a_plan_makes_the_hole_with_the_fewest_bytes(
    layout: list[tuple[int, int]], tail: int, size: int, fixed: set[int]
) -> None:
    extents, owners, size_bytes = laid_out(layout, tail), list(range(len(layout))), size * UNIT
    before = {owner: extents[owner] for owner in owners}
    fits_already = max(holes(extents, owners)) >= size_bytes
    wanted = cheapest(extents, owners, size_bytes, fixed)
    plan = extents.plan(size_bytes, fixed)
    if plan is None:
        assert wanted is None
        assert fixed or size_bytes > extents.free_bytes
        return
    if not fits_already:
        assert wanted == sum(before[move.owner].size_bytes for move in plan)
    for move in plan:
        assert move.owner not in fixed
        assert move.start_bytes < extents[move.owner].start_bytes
        extents.move(move)
        extents.check()
    assert max(holes(extents, owners)) >= size_bytes
    assert extents.place(99, size_bytes) is not None
    extents.check()


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    extents = laid_out([(3, 1), (2, 1), (4, 1)], tail=9)
    assert extents.place(50, 2 * UNIT) == Extent(4 * UNIT, 2 * UNIT)
    assert extents.place(51, 4 * UNIT) == Extent(7 * UNIT, 4 * UNIT)
    assert extents.place(52, 10 * UNIT) is None


def test_check_finds_what_is_wrong() -> None:
    extents = laid_out([(2, 2), (0, 2)], tail=0)
    extents.check()
    extents.move(Move(1, 3 * UNIT))
    try:
        extents.check()
    except AssertionError:
        return
    raise AssertionError("an overlap was not found")
