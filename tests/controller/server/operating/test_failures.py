"""The latest failures are kept per adapter, with their details, in bounded tables."""

from loradock.controller.server.operating.failures import FAILURES_MAX, Failures
from loradock.messages.errors import ErrorCode
from loradock.messages.reports import AdapterChecked, OperationFailed, WeightsDropped
from loradock.messages.requests import Refused


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
    failures.note("a", failed(7), 1_000_000)
    failures.note("", failed(8), 1_000_000)
    shown = failures.view("a", 4_000_000)
    assert shown is not None
    assert (shown.message, shown.details, shown.age_ms) == ("text 7", ("finding 7",), 3)
    # The weights of a failed operation are dropped after it.
    failures.note("a", WeightsDropped(9), 5_000_000)
    assert failures.view("a", 4_000_000) is not None
    failures.note("a", AdapterChecked(10, "f", 8, 1, 1), 5_000_000)
    assert failures.view("a", 6_000_000) is None


def test_the_oldest_failures_are_dropped() -> None:
    failures = Failures()
    for number in range(FAILURES_MAX + 1):
        list(failures.without_details([(failed(number), 1)]))
        failures.note(f"a{number}", failed(number), 0)
    assert failures.view("a0", 0) is None
    assert failures.view("a1", 0) is not None
    first, second = (Refused("c:1", ErrorCode.DOES_NOT_FIT, f"text {number}") for number in (0, 1))
    assert failures.complete(first).details == ()
    assert failures.complete(second).details == ("finding 1",)
