"""Requests of a group are listed if they wait, and as slow ones if they were answered."""

import structlog

from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.server.operating.request_times import SLOW_MAX
from loradock.controller.server.operating.server_control import ServerControl
from loradock.messages import commands, reports
from loradock.messages.control import ListRequests, ListSlow, RequestsListed, SlowListed, SlowView
from loradock.messages.records import ControllerStarted, Input, PoolingRequested
from loradock.messages.requests import EvictAdapter, LoadAdapter, ReleaseAdapter

LONG_AGO_NS = 0
"""The start of the machine: nothing took longer than what arrived then."""

NEVER_NS = 1 << 62


def handled(controller: Controller, *group: Input) -> tuple[Input, ...]:
    for message in group:
        controller.handle(message, 1)
    return group


def waits(control: ServerControl) -> tuple[SlowView, ...]:
    reply = control.answer(ListSlow("q"))
    assert isinstance(reply, SlowListed)
    return reply.waits


def test_requests_of_a_group_wait_or_were_answered_within_it() -> None:
    controller = Controller(Limits())
    control = ServerControl(controller)
    group = handled(
        controller,
        ControllerStarted(1),
        LoadAdapter("c:1", "a"),
        EvictAdapter("c:2", "unknown"),
        ReleaseAdapter("c:3", "a"),
        PoolingRequested("c:4", None, "embed"),
    )
    control.note_group(group, LONG_AGO_NS)
    listed = control.answer(ListRequests("q"))
    assert isinstance(listed, RequestsListed)
    assert [(one.request_id, one.kind, one.adapter) for one in listed.requests] == [
        ("c:1", "load", "a"),
        ("c:4", "embed", ""),
    ]
    assert len({one.age_ms for one in listed.requests}) == 1
    slow = waits(control)
    assert sorted((one.kind, one.adapter, one.outcome) for one in slow) == [
        ("evict", "unknown", "L006"),
        ("release", "a", "done"),
    ]
    assert len({one.duration_ms for one in slow}) == 1


def test_answers_that_are_not_among_the_slowest_are_not_noted() -> None:
    controller = Controller(Limits())
    control = ServerControl(controller)
    group = handled(controller, *[EvictAdapter(f"c:{n}", "slow") for n in range(SLOW_MAX)])
    control.note_group(group, LONG_AGO_NS)
    control.note_group(handled(controller, EvictAdapter("c:x", "fast")), NEVER_NS)
    assert len(waits(control)) == SLOW_MAX
    assert {one.adapter for one in waits(control)} == {"slow"}


def test_an_operation_whose_command_was_lost_is_forgotten() -> None:
    controller = Controller(Limits())
    handled(controller, ControllerStarted(1))
    control = ServerControl(controller)
    for op in (1, 2):
        control.note_command(commands.DropWeights(op, 7))
    control.note_report(reports.EngineInventory("e", 1, "m", 1, 1, last_op=2, running=(2,)))
    for op in (1, 2):
        control.note_report(reports.WeightsDropped(op))
    reply = control.answer(ListSlow("q"))
    assert isinstance(reply, SlowListed)
    assert len(reply.operations) == 1


def test_warnings_of_an_adapter_are_logged_once() -> None:
    controller = Controller(Limits())
    control = ServerControl(controller)
    inventory = reports.EngineInventory("e", 1, "m", 2, 100)
    handled(controller, ControllerStarted(1), inventory, LoadAdapter("c:1", "a"))
    checked = reports.AdapterChecked(1, "f", 8, 1, 1, ("layer 3 has no tensors",))
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            control.note_report(checked)
            handled(controller, checked)
    assert lines == [
        {
            "event": "an adapter has warnings",
            "adapter": "a",
            "warnings": ["layer 3 has no tensors"],
            "log_level": "warning",
        }
    ]
