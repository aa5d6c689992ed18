"""The life cycle: tables, machine, compiled dicts and pictures equal the design.

The transitions are written out here a second time, so that a change of any of them is noticed.
"""

import re
from itertools import pairwise

import pytest
from transitions import Machine, MachineError

from loradock.controller.states.machine import (
    NEXT_STATE,
    NEXT_STEP,
    IllegalTransitionError,
    build,
    next_state,
)
from loradock.controller.states.table import RESIDENCY_LEVEL, STATES, STEPS, TRANSITIONS, Step
from loradock.messages import records, reports
from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, PINNED, UNREGISTERED, AdapterState
from tests.life_cycle import BEGIN, END, diagram, steps_in_markdown, with_life_cycle
from tests.support.sources import ROOT

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
ILLEGAL_PAIRS = [pair for pair in ALL_PAIRS if pair not in DESIGN]


class Model:
    """An object whose state the machine changes."""

    state: AdapterState


def machine_in(state: AdapterState) -> tuple[Machine, Model]:
    """Return a machine of the life cycle and its model in a state."""
    model = Model()
    machine = build(model)
    machine.set_state(state)
    return machine, model


def test_there_are_five_states_and_their_order_is_the_residency_level() -> None:
    assert STATES == ALL_STATES
    assert list(RESIDENCY_LEVEL.items()) == list(zip(ALL_STATES, range(5), strict=True))


def test_inputs_are_called_like_the_messages_that_carry_them() -> None:
    assert {trigger for row in TRANSITIONS.values() for trigger in row} == set(ALL_INPUTS)
    messages = {name for name in ALL_INPUTS if hasattr(reports, name) or hasattr(records, name)}
    # The removal is no message: it ends the record.
    assert set(ALL_INPUTS) - messages == {"AdapterRemoved"}


def test_every_state_has_its_row_in_both_tables() -> None:
    assert tuple(TRANSITIONS) == tuple(STEPS) == ALL_STATES


def test_the_compiled_dict_is_the_design() -> None:
    assert NEXT_STATE == DESIGN


def test_the_machine_has_the_states_and_transitions_of_the_dict_and_no_others() -> None:
    machine = build()
    assert tuple(machine.states) == ALL_STATES
    transitions = {
        (transition.source, trigger): transition.dest
        for trigger, event in machine.events.items()
        for rows in event.transitions.values()
        for transition in rows
    }
    assert transitions == NEXT_STATE


@pytest.mark.parametrize(("state", "trigger"), DESIGN)
def test_a_legal_trigger_moves_the_machine_as_the_dict_does(
    state: AdapterState, trigger: str
) -> None:
    _, model = machine_in(state)
    assert model.trigger(trigger)  # type: ignore[attr-defined]
    assert model.state == next_state("a", state, trigger) == DESIGN[state, trigger]


@pytest.mark.parametrize(("state", "trigger"), ILLEGAL_PAIRS)
def test_an_illegal_trigger_is_refused_by_both_and_changes_nothing(
    state: AdapterState, trigger: str
) -> None:
    _, model = machine_in(state)
    with pytest.raises(MachineError):
        model.trigger(trigger)  # type: ignore[attr-defined]
    assert model.state == state
    before = dict(NEXT_STATE)
    with pytest.raises(IllegalTransitionError):
        next_state("a", state, trigger)
    assert before == NEXT_STATE


@pytest.mark.parametrize(("state", "trigger"), ILLEGAL_PAIRS)
def test_the_error_names_adapter_state_and_input(state: AdapterState, trigger: str) -> None:
    with pytest.raises(IllegalTransitionError) as caught:
        next_state("my-adapter", state, trigger)
    error = caught.value
    assert (error.adapter, error.state, error.trigger) == ("my-adapter", state, trigger)
    for part in ("my-adapter", state, trigger):
        assert part in str(error)


def test_the_machine_can_not_bypass_the_table() -> None:
    machine, _ = machine_in("pinned")
    assert set(machine.events) == set(ALL_INPUTS)
    assert not machine.has_queue
    for event in machine.events.values():
        for transitions in event.transitions.values():
            assert len(transitions) == 1
            assert not transitions[0].conditions
            assert not transitions[0].before
            assert not transitions[0].after


def test_the_diagram_has_every_transition_and_nothing_else() -> None:
    lines = diagram().splitlines()
    drawn = {}
    for line in lines:
        match = re.fullmatch(r"    (\w+) --> (\w+): (\w+)", line)
        if match:
            source, target, trigger = match.groups()
            drawn[source.replace("_", "-"), trigger] = target.replace("_", "-")
    assert drawn == DESIGN
    declared = [re.fullmatch(r'    state "([\w-]+)" as (\w+)', line) for line in lines]
    names = [match.groups() for match in declared if match]
    assert names == [(state, state.replace("-", "_")) for state in ALL_STATES]
    # The head, the five states, the entry arrow and the transitions.
    assert len(lines) == 1 + 5 + 1 + len(DESIGN)


def test_the_table_of_steps_has_a_row_per_state_and_a_column_per_goal() -> None:
    head, _, *rows = [line.strip("| ").split(" | ") for line in steps_in_markdown().splitlines()]
    drawn = {
        (state, goal): step
        for state, *steps in rows
        for goal, step in zip(head[1:], steps, strict=True)
    }
    assert drawn == NEXT_STEP
    assert set(NEXT_STEP) == {(state, goal) for state in ALL_STATES for goal in ALL_STATES}


INPUT_AFTER: dict[Step, str] = {
    "load": "WeightsLoaded",
    "stage": "WeightsStaged",
    "write": "SlotWritten",
    "reset": "SlotReset",
    "unstage": "WeightsUnstaged",
    "drop": "WeightsDropped",
    "forget": "AdapterRemoved",
}
"""The input that each step causes when it succeeds."""


@pytest.mark.parametrize("goal", STATES)
@pytest.mark.parametrize("state", STATES)
def test_steps_lead_to_the_goal_and_end_there(state: AdapterState, goal: AdapterState) -> None:
    levels = [RESIDENCY_LEVEL[state]]
    for _ in STATES:
        step = NEXT_STEP[state, goal]
        if step == "stay":
            break
        # Raises if the table of transitions has no such row.
        state = next_state("a", state, INPUT_AFTER[step])
        levels.append(RESIDENCY_LEVEL[state])
        if step == "forget":
            # The record is deleted; from `unregistered`, the goal `evicted` has no other way.
            assert goal in (UNREGISTERED, EVICTED)
            return
    assert state == goal
    rises = [after - before for before, after in pairwise(levels)]
    # The direction never changes.
    assert all(rise > 0 for rise in rises) or all(rise < 0 for rise in rises)


def test_a_slot_is_always_reset_before_weights_leave_the_host() -> None:
    """The blob of an adapter in a slot stays page-locked until the slot is reset."""
    assert {NEXT_STEP[GPU_SLOT, goal] for goal in STATES if goal != GPU_SLOT} == {"reset"}
    assert NEXT_STEP[PINNED, CPU_CACHED] == "unstage"


def test_the_document_has_the_current_pictures_and_its_other_text_stays() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert with_life_cycle(text) == text, "run `make diagrams`"
    fresh = with_life_cycle(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert fresh.startswith("before\n")
    assert fresh.endswith("\nafter\n")
    with pytest.raises(ValueError, match="marks"):
        with_life_cycle("no marks")
