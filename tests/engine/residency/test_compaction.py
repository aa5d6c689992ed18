"""Laws of sliding: bytes lie whole at the new place, or whole at the old."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.residency.compaction import SlideLost, Slider
from tests.support.engine.arena_examples import CopyFailedError, ManualCopier

MEMORY_BYTES = 600


def make(bounce_bytes: int, failing: range) -> tuple[torch.Tensor, Slider]:
    memory = (torch.arange(MEMORY_BYTES) % 251).to(torch.uint8)
    bounce = torch.zeros(bounce_bytes, dtype=torch.uint8)
    return memory, Slider(memory, bounce, ManualCopier(failing_moves=failing))


@settings(max_examples=300, deadline=None)
@given(
    target=st.integers(0, 200),
    distance=st.integers(1, 200),
    size=st.integers(1, 200),
    bounce_bytes=st.sampled_from([1, 7, 64, 256]),
    failing=st.integers(0, 20) | st.none(),
)
def test_a_slide_arrives_whole_or_changes_nothing(
    target: int, distance: int, size: int, bounce_bytes: int, failing: int | None
) -> None:
    source = target + distance
    memory, slider = make(
        bounce_bytes, range(0) if failing is None else range(failing, failing + 1)
    )
    before = memory.clone()
    try:
        slider.slide(source, target, size)
    except CopyFailedError:
        assert torch.equal(memory[source : source + size], before[source : source + size])
    else:
        assert torch.equal(memory[target : target + size], before[source : source + size])
    assert torch.equal(memory[:target], before[:target])
    assert torch.equal(memory[source + size :], before[source + size :])


def test_what_can_neither_arrive_nor_go_back_is_told() -> None:
    _, slider = make(8, range(3, 1000))
    with pytest.raises(SlideLost):
        slider.slide(source=110, target=100, size=50)
