"""Properties of compaction: bytes arrive whole, and a failing move raises."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.residency.extents import Compactor, Extent, Extents
from tests.support.engine.arena_examples import CopyFailedError, ManualCopier

MEMORY_BYTES = 600
UNIT = 128


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
