"""The life cycle: table, machine, compiled dict and diagram equal the design.

The transitions are written out here a second time, so that a change of any of the four is noticed.
"""

import re

import pytest
from transitions import Machine, MachineError

from loradock.controller.states.diagram import mermaid
from loradock.controller.states.machine import NEXT_STATE, IllegalTransitionError, build, next_state
from loradock.controller.states.table import RESIDENCY_LEVEL, STATES, TRANSITIONS
from loradock.messages import records, reports
from loradock.messages.ids import AdapterState

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
    assert {trigger for _, trigger, _ in TRANSITIONS} == set(ALL_INPUTS)
    messages = {name for name in ALL_INPUTS if hasattr(reports, name) or hasattr(records, name)}
    # The removal is no message: it ends the record.
    assert set(ALL_INPUTS) - messages == {"AdapterRemoved"}


def test_the_table_is_the_design_without_a_pair_twice() -> None:
    assert {(source, trigger): target for source, trigger, target in TRANSITIONS} == DESIGN
    assert len(TRANSITIONS) == len(DESIGN)


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
    lines = mermaid().splitlines()
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
