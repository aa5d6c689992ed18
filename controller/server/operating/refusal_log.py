"""The refusals of requests in the server's log: with code and request, and bounded in number."""

from typing import Final

import structlog

from loradock.messages.requests import Refused

LINES_MAX: Final = 100
"""Bound on the lines of one window of time; the rest of its refusals are counted."""

WINDOW_NS: Final = 10_000_000_000

_REASON_CHARACTERS_MAX: Final = 500

log = structlog.get_logger("controller")


class RefusalLog:
    """Writes one line per refusal, and one line per window for those beyond the bound."""

    def __init__(self) -> None:
        self._window_ns = 0
        self._lines = 0
        self._dropped = 0

    def note(self, refused: Refused, now_ns: int) -> None:
        """Write a line about a refusal; `request` is its id inside the controller."""
        self.tick(now_ns)
        if self._lines >= LINES_MAX:
            self._dropped += 1
            return
        self._lines += 1
        log.info(
            "request refused",
            code=refused.code.value,
            request=refused.request_id,
            reason=refused.message[:_REASON_CHARACTERS_MAX],
        )

    def tick(self, now_ns: int) -> None:
        """Begin a new window if the last one is over."""
        if now_ns - self._window_ns < WINDOW_NS:
            return
        if self._dropped:
            log.warning("more requests were refused than are logged", count=self._dropped)
        self._window_ns, self._lines, self._dropped = now_ns, 0, 0
