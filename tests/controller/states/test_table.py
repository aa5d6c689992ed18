"""The life cycle: the design's table, the machine and the compiled table say the same.

The table is written out here a second time, literally, so that a change of any of the three is
seen by the other two.
"""

import re
from itertools import pairwise

import pytest
from transitions import MachineError

from controller.core.next_step import NEXT_STEP, Step
from controller.states import spec
from controller.states.diagram import mermaid
from controller.states.machine import STATES, build
from controller.states.table import HEIGHT, MOVES, IllegalMoveError, move
from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState

DESIGN: dict[tuple[AdapterState, str], AdapterState] = {
    ("unregistered", "WeightsLoaded"): "cpu-cached",
    ("unregistered", "AdapterRemoved"): "unregistered",
    ("evicted", "WeightsLoaded"): "cpu-cached",
    ("evicted", "AdapterRemoved"): "unregistered",
    ("cpu-cached", "WeightsStaged"): "pinned",
    ("cpu-cached", "WeightsDropped"): "evicted",
    ("cpu-cached", "EngineLost"): "evicted",
    ("pinned", "SlotWritten"): "gpu-slot",
    ("pinned", "WeightsUnstaged"): "cpu-cached",
    ("pinned", "WeightsDropped"): "evicted",
    ("pinned", "EngineLost"): "evicted",
    ("gpu-slot", "SlotReset"): "pinned",
    ("gpu-slot", "EngineLost"): "evicted",
}

ALL_STATES: tuple[AdapterState, ...] = (
    "unregistered",
    "evicted",
    "cpu-cached",
    "pinned",
    "gpu-slot",
)
ALL_INPUTS = (
    "WeightsLoaded",
    "WeightsStaged",
    "WeightsUnstaged",
    "WeightsDropped",
    "SlotWritten",
    "SlotReset",
    "EngineLost",
    "AdapterRemoved",
)
ALL_PAIRS = [(state, trigger) for state in ALL_STATES for trigger in ALL_INPUTS]


class Model:
    """What the real machine moves about."""

    state: str


def test_there_are_five_states_in_order_of_height() -> None:
    assert tuple(state.name for state in STATES) == ALL_STATES
    assert {state: HEIGHT[state] for state in ALL_STATES} == dict(
        zip(ALL_STATES, range(5), strict=True)
    )


def test_inputs_are_called_like_the_messages_that_carry_them() -> None:
    assert spec.INPUTS == ALL_INPUTS


def test_the_compiled_table_is_the_designs() -> None:
    assert MOVES == DESIGN


def test_every_state_module_has_its_rows_and_no_other() -> None:
    rows = {(state.name, trigger): to for state in STATES for trigger, to in state.moves.items()}
    assert rows == DESIGN
    assert all(state.fact for state in STATES)


@pytest.mark.parametrize(("state", "trigger"), ALL_PAIRS)
def test_the_machine_does_what_the_table_says(state: AdapterState, trigger: str) -> None:
    model = Model()
    machine = build(model)
    machine.set_state(state)
    if (state, trigger) in DESIGN:
        assert model.trigger(trigger)  # type: ignore[attr-defined]
        assert model.state == DESIGN[state, trigger]
        assert move("a", state, trigger) == DESIGN[state, trigger]
    else:
        with pytest.raises(MachineError):
            model.trigger(trigger)  # type: ignore[attr-defined]
        assert model.state == state


@pytest.mark.parametrize(("state", "trigger"), [pair for pair in ALL_PAIRS if pair not in DESIGN])
def test_an_illegal_move_names_adapter_state_and_input(state: AdapterState, trigger: str) -> None:
    before = dict(MOVES)
    with pytest.raises(IllegalMoveError) as caught:
        move("my-adapter", state, trigger)
    error = caught.value
    assert (error.adapter, error.state, error.trigger) == ("my-adapter", state, trigger)
    for part in ("my-adapter", state, trigger):
        assert part in str(error)
    assert before == MOVES


def test_the_machine_has_no_ways_round_the_table() -> None:
    machine = build(Model())
    assert set(machine.events) == set(ALL_INPUTS)
    assert not machine.has_queue
    for event in machine.events.values():
        for transitions in event.transitions.values():
            assert len(transitions) == 1
            assert not transitions[0].conditions
            assert not transitions[0].before
            assert not transitions[0].after


def test_the_diagram_shows_every_row_and_nothing_else() -> None:
    lines = mermaid().splitlines()
    drawn = {}
    for line in lines:
        found = re.fullmatch(r"    (\w+) --> (\w+): (\w+)", line)
        if found:
            source, target, trigger = found.groups()
            drawn[source.replace("_", "-"), trigger] = target.replace("_", "-")
    assert drawn == DESIGN
    declared = [re.fullmatch(r'    state "([\w-]+)" as (\w+)', line) for line in lines]
    names = [found.groups() for found in declared if found]
    assert names == [(state, state.replace("-", "_")) for state in ALL_STATES]
    # The head, the five states, the entry arrow and the rows.
    assert len(lines) == 1 + 5 + 1 + len(DESIGN)


STEP_INPUT = {
    Step.LOAD: "WeightsLoaded",
    Step.STAGE: "WeightsStaged",
    Step.WRITE: "SlotWritten",
    Step.RESET: "SlotReset",
    Step.UNSTAGE: "WeightsUnstaged",
    Step.DROP: "WeightsDropped",
    Step.FORGET: "AdapterRemoved",
}


def test_every_state_and_goal_has_a_next_step() -> None:
    assert set(NEXT_STEP) == set(ALL_STATES)
    for row in NEXT_STEP.values():
        assert set(row) == set(ALL_STATES)


@pytest.mark.parametrize("goal", ALL_STATES)
@pytest.mark.parametrize("state", ALL_STATES)
def test_steps_lead_to_the_goal_and_end_there(state: AdapterState, goal: AdapterState) -> None:
    heights = [HEIGHT[state]]
    for _ in ALL_STATES:
        step = NEXT_STEP[state][goal]
        if step is Step.STAY:
            break
        # Every step is a row of the table.
        state = DESIGN[state, STEP_INPUT[step]]
        heights.append(HEIGHT[state])
        if step is Step.FORGET:
            # The record is gone; a goal of `evicted` has no other way from `unregistered`.
            assert goal in (UNREGISTERED, EVICTED)
            return
    assert state == goal
    rises = [after - before for before, after in pairwise(heights)]
    # It never turns round on its way.
    assert all(rise > 0 for rise in rises) or all(rise < 0 for rise in rises)


def test_only_a_slot_is_left_by_one_way() -> None:
    """What is on the device is reset first; its blob stays page-locked until then."""
    for goal in ALL_STATES:
        if goal != GPU_SLOT:
            assert NEXT_STEP[GPU_SLOT][goal] is Step.RESET
    assert NEXT_STEP[PINNED][CPU_CACHED] is Step.UNSTAGE
