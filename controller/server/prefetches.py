"""Prefetches that the server makes by itself, for `--prefetch-history`."""

import secrets
from collections.abc import Container
from typing import Final

from loradock.controller.core.use_history import UseHistory
from loradock.messages.ids import AdapterName
from loradock.messages.records import InferenceRequested
from loradock.messages.requests import PrefetchAdapter

_PREFIX: Final = "prefetch-"


class HistoryPrefetches:
    """The prefetches that follow from the requests since this start."""

    def __init__(self) -> None:
        self._history = UseHistory()
        self._start: Final = secrets.token_hex(6)
        self._count = 0

    def record(self, message: InferenceRequested, time_ns: int) -> None:
        """Record a request at its recorded time."""
        if message.adapter:
            self._history.use(message.adapter, time_ns)

    def next_ns(self) -> int | None:
        """Return when a prefetch is due; None if none is."""
        return self._history.next_ns()

    def take_due(self, time_ns: int, known: Container[AdapterName]) -> list[PrefetchAdapter]:
        """Return the prefetches of known adapters that are due; no client uses their ids."""
        names = [name for name in self._history.take_due(time_ns) if name in known]
        first, self._count = self._count, self._count + len(names)
        return [
            PrefetchAdapter(f"{_PREFIX}{self._start}-{number}", name)
            for number, name in enumerate(names, first)
        ]


def is_own_prefetch(message: object) -> bool:
    """Return whether an input is such a prefetch, for which no client waits."""
    return isinstance(message, PrefetchAdapter) and message.request_id.startswith(_PREFIX)
