"""Which events `loradock events` prints: since when, of which adapters and types."""

import difflib
import re
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final, get_args

from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.client.streams import EventItem, Gap, Snapshot
from loradock.messages.events import Event

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN: Final = re.compile(r"([0-9]{1,9})([smhd])")
_TYPES: Final[tuple[str, ...]] = tuple(sorted(one.__name__ for one in get_args(Event)))


def start_of(since: str | None, *, follow: bool) -> tuple[int | None, int]:
    """Return the event to start after, None for now, and the UTC time of the first to print in ns.

    Raises `CommandError` for what is neither an event's number nor a time.
    """
    if since is None:
        return (None if follow else 0), 0
    if since.isdecimal() and since.isascii():
        return int(since), 0
    span = _SPAN.fullmatch(since)
    if span is None:
        raise CommandError(
            ExitCode.USAGE,
            f"--since must be an event's number or a time such as 10m, got {since!r}",
            "units are s, m, h and d",
        )
    return 0, time.time_ns() - int(span[1]) * _SECONDS[span[2]] * 1_000_000_000


class EventFilter:
    """The events to print; what replaces missing events always is."""

    def __init__(
        self, adapters: Sequence[str], types: Sequence[str], after: int, since_ns: int
    ) -> None:
        """Raise `CommandError` for a type that no event has."""
        self._after = after
        self._adapters = tuple(adapters)
        self._types = frozenset(map(_type_of, types))
        self._since_ns = since_ns

    def has(self, item: EventItem) -> bool:
        """Return whether to print an item."""
        if isinstance(item, Gap | Snapshot):
            return True
        if item.seq <= self._after or item.time_ns < self._since_ns:
            return False
        if self._types and type(item.event).__name__ not in self._types:
            return False
        name = getattr(item.event, "adapter", "")
        return not self._adapters or any(fnmatchcase(name, one) for one in self._adapters)


def _type_of(text: str) -> str:
    by_lower = {name.lower(): name for name in _TYPES}
    found = by_lower.get(text.lower().replace("-", ""))
    if found is None:
        close = difflib.get_close_matches(text, _TYPES, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"types are {', '.join(_TYPES)}"
        raise CommandError(ExitCode.USAGE, f"no event has the type {text!r}", hint)
    return found
