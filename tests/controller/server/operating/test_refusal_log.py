"""Refusals are lines of the server's log, and a flood of them is bounded and counted."""

import structlog

from loradock.controller.server.operating.refusal_log import LINES_MAX, WINDOW_NS, RefusalLog
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import Refused


def test_a_flood_of_refusals_is_bounded_and_counted() -> None:
    refused = Refused("c:7", ErrorCode.UNKNOWN_ADAPTER, "x" * 5000)
    with structlog.testing.capture_logs() as lines:
        log = RefusalLog()
        for _ in range(LINES_MAX + 25):
            log.note(refused, WINDOW_NS)
        assert len(lines) == LINES_MAX
        log.note(refused, 2 * WINDOW_NS)
    assert len(lines) == LINES_MAX + 2
    assert lines[LINES_MAX]["count"] == 25
    first = lines[0]
    assert (first["code"], first["request"], first["log_level"]) == ("L006", "c:7", "info")
    assert len(first["reason"]) == 500
