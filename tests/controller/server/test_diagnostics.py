"""The recent past for the operator: failures, slow requests and operations, and refusals."""

from random import Random

import structlog

from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.server.diagnostics import (
    FAILURES_MAX,
    REFUSALS_MAX,
    SLOW_KEPT_NS,
    SLOW_MAX,
    WINDOW_NS,
    Diagnostics,
    Failures,
    RefusalLog,
    RequestTimes,
    SlowestTable,
)
from loradock.messages import commands, reports
from loradock.messages.control import SlowView
from loradock.messages.errors import ErrorCode
from loradock.messages.records import ControllerStarted, Input, PoolingRequested
from loradock.messages.reports import AdapterChecked, OperationFailed, WeightsDropped
from loradock.messages.requests import EvictAdapter, LoadAdapter, Refused, ReleaseAdapter

MS = 1_000_000

LONG_AGO_NS = 0
"""The start of the machine: nothing took longer than what arrived then."""

NEVER_NS = 1 << 62


def failed(number: int) -> OperationFailed:
    code = ErrorCode.DOES_NOT_FIT
    return OperationFailed(number, code, f"text {number}", (f"finding {number}",))


def test_a_report_is_logged_without_its_details_and_a_refusal_is_answered_with_them() -> None:
    failures = Failures()
    others = (WeightsDropped(9), 2), (OperationFailed(3, ErrorCode.NOT_FOUND, "no file"), 4)
    [logged, *rest] = failures.without_details([(failed(7), 1), *others])
    assert logged == (OperationFailed(7, ErrorCode.DOES_NOT_FIT, "text 7"), 1)
    assert tuple(rest) == others
    refused = Refused("c:1", ErrorCode.DOES_NOT_FIT, "text 7")
    assert failures.complete(refused).details == ("finding 7",)
    other = Refused("c:1", ErrorCode.NOT_FOUND, "text 7")
    assert failures.complete(other) is other


def test_a_failure_is_shown_until_an_operation_succeeds() -> None:
    failures = Failures()
    list(failures.without_details([(failed(7), 1)]))
    assert failures.view("a", 0) is None
    failures.record("a", failed(7), 1_000_000)
    failures.record("", failed(8), 1_000_000)
    shown = failures.view("a", 4_000_000)
    assert shown is not None
    assert (shown.message, shown.details, shown.age_ms) == ("text 7", ("finding 7",), 3)
    # The weights of a failed operation are dropped after it.
    failures.record("a", WeightsDropped(9), 5_000_000)
    assert failures.view("a", 4_000_000) is not None
    failures.record("a", AdapterChecked(10, "f", 8, 1, 1), 5_000_000)
    assert failures.view("a", 6_000_000) is None


def test_the_oldest_failures_are_dropped() -> None:
    failures = Failures()
    for number in range(FAILURES_MAX + 1):
        list(failures.without_details([(failed(number), 1)]))
        failures.record(f"a{number}", failed(number), 0)
    assert failures.view("a0", 0) is None
    assert failures.view("a1", 0) is not None
    first, second = (Refused("c:1", ErrorCode.DOES_NOT_FIT, f"text {number}") for number in (0, 1))
    assert failures.complete(first).details == ()
    assert failures.complete(second).details == ("finding 1",)


def test_the_slowest_are_kept() -> None:
    random, table = Random(3), SlowestTable()
    durations = [random.randrange(1, 10_000) * MS for _ in range(500)]
    for number, duration_ns in enumerate(durations):
        table.add(number, duration_ns, "load", str(number), "done")
    found = [view.duration_ms for view in table.views(500)]
    assert found == [one // MS for one in sorted(durations, reverse=True)[:SLOW_MAX]]


def test_what_ended_more_than_an_hour_ago_makes_space() -> None:
    table = SlowestTable()
    for number in range(SLOW_MAX):
        table.add(number, 1000 * MS, "load", "old", "done")
    table.add(SLOW_KEPT_NS + SLOW_MAX, MS, "load", "new", "L002")
    (view,) = table.views(SLOW_KEPT_NS + SLOW_MAX + 5 * MS)
    assert (view.adapter, view.duration_ms, view.ended_ms_ago, view.outcome) == (
        "new",
        1,
        5,
        "L002",
    )


def test_ages_and_tokens_of_requests() -> None:
    times = RequestTimes(10 * MS)
    times.begin_request("a", "generate", "x", 20 * MS)
    times.begin_request("a", "generate", "x", 30 * MS)
    times.count_tokens("a", 5)
    times.count_tokens("a", 3)
    pending = [("a", "generate", "x", True), ("before", "load", "y", False)]
    first, second = times.views(iter(pending), 50 * MS)
    assert (first.phase, first.age_ms, first.tokens) == ("running", 30, 5)
    assert (second.phase, second.age_ms, second.tokens) == ("waiting", 40, 0)
    times.end_request("a", "done", 60 * MS)
    times.end_request("a", "done", 90 * MS)
    assert [view.duration_ms for view in times.slow_requests.views(60 * MS)] == [40]


def test_operations_that_the_engine_does_not_run_are_forgotten() -> None:
    times = RequestTimes(0)
    for op in range(1, 4):
        times.begin_operation(op, "load", str(op), 0)
    times.keep_operations((2,))
    for op in range(1, 4):
        times.end_operation(op, "done", 5 * MS)
    assert [view.adapter for view in times.slow_operations.views(60 * MS)] == ["2"]


def test_a_flood_of_refusals_is_bounded_and_counted() -> None:
    refused = Refused("c:7", ErrorCode.UNKNOWN_ADAPTER, "x" * 5000)
    with structlog.testing.capture_logs() as lines:
        log = RefusalLog()
        for _ in range(REFUSALS_MAX + 25):
            log.record(refused, WINDOW_NS)
        assert len(lines) == REFUSALS_MAX
        log.record(refused, 2 * WINDOW_NS)
    assert len(lines) == REFUSALS_MAX + 2
    assert lines[REFUSALS_MAX]["count"] == 25
    first = lines[0]
    assert (first["code"], first["request"], first["log_level"]) == ("L006", "c:7", "info")
    assert len(first["reason"]) == 500


def handled(controller: Controller, *group: Input) -> tuple[Input, ...]:
    for message in group:
        controller.handle(message, 1)
    return group


def waits(diagnostics: Diagnostics) -> tuple[SlowView, ...]:
    return diagnostics.times.slow_requests.views(LONG_AGO_NS)


def test_requests_of_a_group_wait_or_were_answered_within_it() -> None:
    controller = Controller(Limits())
    diagnostics = Diagnostics(controller.world)
    group = handled(
        controller,
        ControllerStarted(1),
        LoadAdapter("c:1", "a"),
        EvictAdapter("c:2", "unknown"),
        ReleaseAdapter("c:3", "a"),
        PoolingRequested("c:4", None, "embed"),
    )
    diagnostics.record_group(group, LONG_AGO_NS)
    listed = diagnostics.times.views(diagnostics.pending(), LONG_AGO_NS)
    assert [(one.request_id, one.kind, one.adapter) for one in listed] == [
        ("c:1", "load", "a"),
        ("c:4", "embed", ""),
    ]
    assert len({one.age_ms for one in listed}) == 1
    slow = waits(diagnostics)
    assert sorted((one.kind, one.adapter, one.outcome) for one in slow) == [
        ("evict", "unknown", "L006"),
        ("release", "a", "done"),
    ]
    assert len({one.duration_ms for one in slow}) == 1


def test_answers_that_are_not_among_the_slowest_are_not_recorded() -> None:
    controller = Controller(Limits())
    diagnostics = Diagnostics(controller.world)
    group = handled(controller, *[EvictAdapter(f"c:{n}", "slow") for n in range(SLOW_MAX)])
    diagnostics.record_group(group, LONG_AGO_NS)
    diagnostics.record_group(handled(controller, EvictAdapter("c:x", "fast")), NEVER_NS)
    assert len(waits(diagnostics)) == SLOW_MAX
    assert {one.adapter for one in waits(diagnostics)} == {"slow"}


def test_an_operation_whose_command_was_lost_is_forgotten() -> None:
    controller = Controller(Limits())
    handled(controller, ControllerStarted(1))
    diagnostics = Diagnostics(controller.world)
    for op in (1, 2):
        diagnostics.record_command(commands.DropWeights(op, 7))
    diagnostics.record_report(reports.EngineInventory("e", 1, "m", 1, 1, last_op=2, running=(2,)))
    for op in (1, 2):
        diagnostics.record_report(reports.WeightsDropped(op))
    assert len(diagnostics.times.slow_operations.views(LONG_AGO_NS)) == 1


def test_warnings_of_an_adapter_are_logged_once() -> None:
    controller = Controller(Limits())
    diagnostics = Diagnostics(controller.world)
    inventory = reports.EngineInventory("e", 1, "m", 2, 100)
    handled(controller, ControllerStarted(1), inventory, LoadAdapter("c:1", "a"))
    checked = reports.AdapterChecked(1, "f", 8, 1, 1, ("layer 3 has no tensors",))
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            diagnostics.record_report(checked)
            handled(controller, checked)
    assert lines == [
        {
            "event": "an adapter has warnings",
            "adapter": "a",
            "warnings": ["layer 3 has no tensors"],
            "log_level": "warning",
        }
    ]
