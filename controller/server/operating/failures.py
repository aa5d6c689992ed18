"""The latest failures of operations on adapters, with the details that the log does not have.

A text of the engine names the first finding of many; the others would fill the log and the table of
answers. So they are kept here, in bounded tables, and end with the process.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec

from loradock.messages.errors import ErrorCode
from loradock.messages.ids import AdapterName, Seq
from loradock.messages.reports import (
    AdapterChecked,
    LoggedReport,
    OperationFailed,
    SlotWritten,
    WeightsLoaded,
)
from loradock.messages.requests import Refused
from loradock.messages.views import Details, FailureView

FAILURES_MAX: Final = 128
"""Bound on the texts with details, and on the names with a failure; the oldest ones are dropped."""

_NS_PER_MS: Final = 1_000_000

K = TypeVar("K")
V = TypeVar("V")


class _Failure(NamedTuple):
    code: ErrorCode
    message: str
    failed_ns: int


class Failures:
    """The last failure of each adapter, and the details of the last texts."""

    def __init__(self) -> None:
        self._details: dict[tuple[ErrorCode, str], Details] = {}
        self._by_name: dict[AdapterName, _Failure] = {}

    def without_details(
        self, received: Iterable[tuple[LoggedReport, Seq]]
    ) -> Iterator[tuple[LoggedReport, Seq]]:
        """Yield reports as they are logged; what that leaves out is kept."""
        for report, seq in received:
            if isinstance(report, OperationFailed) and report.details:
                _put(self._details, (report.code, report.message), report.details)
                yield msgspec.structs.replace(report, details=()), seq
            else:
                yield report, seq

    def note(self, adapter: AdapterName, report: object, now_ns: int) -> None:
        """Note a report on an operation that moves an adapter; `adapter` is empty for others."""
        if isinstance(report, OperationFailed) and adapter:
            _put(self._by_name, adapter, _Failure(report.code, report.message, now_ns))
        elif isinstance(report, AdapterChecked | WeightsLoaded | SlotWritten):
            self._by_name.pop(adapter, None)

    def complete(self, refused: Refused) -> Refused:
        """Return a refusal with the details of its text, if they are kept."""
        details = self._details.get((refused.code, refused.message), ())
        return msgspec.structs.replace(refused, details=details) if details else refused

    def view(self, adapter: AdapterName, now_ns: int) -> FailureView | None:
        """Return the failure of an adapter on which no operation has succeeded since."""
        found = self._by_name.get(adapter)
        if found is None:
            return None
        details = self._details.get((found.code, found.message), ())
        age_ms = (now_ns - found.failed_ns) // _NS_PER_MS
        return FailureView(found.code, found.message, details, age_ms)


def _put(table: dict[K, V], key: K, value: V) -> None:
    """Make an entry the newest one, and drop the oldest beyond the bound."""
    table.pop(key, None)
    table[key] = value
    if len(table) > FAILURES_MAX:
        del table[next(iter(table))]
