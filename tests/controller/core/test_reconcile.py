"""The table of next steps: every state reaches every goal by legal transitions."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from loradock.controller.core.reconcile import (
    NEXT_STEP,
    drop,
    forget,
    load,
    reset,
    stage,
    stay,
    unstage,
    write,
)
from loradock.controller.states.machine import next_state
from loradock.controller.states.table import RESIDENCY_LEVEL, STATES
from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState

INPUT_AFTER: dict[Callable[..., Any], str] = {
    load: "WeightsLoaded",
    stage: "WeightsStaged",
    write: "SlotWritten",
    reset: "SlotReset",
    unstage: "WeightsUnstaged",
    drop: "WeightsDropped",
    forget: "AdapterRemoved",
}
"""The input that each step causes when it succeeds."""


def test_every_state_and_goal_has_a_step() -> None:
    assert set(NEXT_STEP) == {(state, goal) for state in STATES for goal in STATES}
    assert set(NEXT_STEP.values()) == {stay, *INPUT_AFTER}


@pytest.mark.parametrize("goal", STATES)
@pytest.mark.parametrize("state", STATES)
def test_steps_lead_to_the_goal_and_end_there(state: AdapterState, goal: AdapterState) -> None:
    levels = [RESIDENCY_LEVEL[state]]
    for _ in STATES:
        step = NEXT_STEP[state, goal]
        if step is stay:
            break
        # Raises where the table of transitions has no such row.
        state = next_state("a", state, INPUT_AFTER[step])
        levels.append(RESIDENCY_LEVEL[state])
        if step is forget:
            # The record is deleted; from `unregistered`, the goal `evicted` has no other way.
            assert goal in (UNREGISTERED, EVICTED)
            return
    assert state == goal
    rises = [after - before for before, after in pairwise(levels)]
    # The direction never changes.
    assert all(rise > 0 for rise in rises) or all(rise < 0 for rise in rises)


def test_a_slot_is_always_reset_before_weights_leave_the_host() -> None:
    """The blob of an adapter in a slot stays page-locked until the slot is reset."""
    for goal in STATES:
        if goal != GPU_SLOT:
            assert NEXT_STEP[GPU_SLOT, goal] is reset
    assert NEXT_STEP[PINNED, CPU_CACHED] is unstage
