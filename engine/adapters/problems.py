"""All problems of one adapter, reported in one error.

Text from a file is shown in ASCII and shortened, so that an error can always be logged and sent.
"""

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from loradock.engine.errors import (
    AdapterConfigRefused,
    AdapterDoesNotFit,
    EngineError,
    NotFinite,
    bounded_details,
)

_SHOWN_MAX: Final = 160
_NAMES_MAX: Final = 4
"""The most names that one problem lists: a wrong base model concerns every module."""
_PARTS: Final = reprlib.Repr()
_PARTS.maxlevel = 4
_PARTS.maxdict = _PARTS.maxlist = _PARTS.maxtuple = _PARTS.maxset = 16
_PARTS.maxstring = _PARTS.maxlong = _PARTS.maxother = _SHOWN_MAX
_SEVEREST_FIRST: Final = (AdapterConfigRefused, AdapterDoesNotFit, NotFinite)


def shown(value: object) -> str:
    """Return a value from a file as text for an error: ASCII, quoted, shortened.

    Only the parts that are shown are formatted: formatting is a single call, which can take long.
    """
    return _shortened(_PARTS.repr(value).encode("ascii", "backslashreplace").decode())


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}... ({len(text)} characters)"


def listed(names: Sequence[str]) -> str:
    """Return the first of several names (ASCII), and the number of the others."""
    more = len(names) - _NAMES_MAX
    first = ", ".join(_shortened(name) for name in names[:_NAMES_MAX])
    return first + (f" and {more} more" if more > 0 else "")


class Problems:
    """The problems found so far; the error's text shows the first `shown_max`.

    Its details have a line per problem and per name that has it, if the text leaves any out.
    """

    def __init__(self, shown_max: int) -> None:
        self._shown_max = shown_max
        self._count = 0
        self._shown: list[str] = []
        self._details: list[str] = []
        self._kinds: set[type[EngineError]] = set()

    def add(self, kind: type[EngineError], text: str, details: Iterable[str] = ()) -> None:
        """Add one problem; `details` are the findings that `text` sums up, if there are several."""
        self._count += 1
        self._kinds.add(kind)
        self._details.extend(details or (text,))
        if len(self._shown) < self._shown_max:
            self._shown.append(text)

    def __len__(self) -> int:
        return self._count

    def add_each(self, kind: type[EngineError], text: str, names: Sequence[str]) -> None:
        """Add one problem, `text`, which all of `names` (ASCII) have; nothing without names."""
        if names:
            each = [f"{text}: {_shortened(name)}" for name in names]
            self.add(kind, f"{text}: {listed(names)}", each)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Add what the block raises about the adapter as one problem, and continue after it."""
        try:
            yield
        except _SEVEREST_FIRST as error:
            self.add(type(error), str(error), error.details)

    def error(self) -> EngineError:
        """Return one error for all problems, of the first class among config, fit, values."""
        more = self._count - len(self._shown)
        texts = [*self._shown, f"and {more} more"] if more else self._shown
        error = self._error_class()("; ".join(texts))
        if len(self._details) > len(self._shown):
            error.details = bounded_details(self._details)
        return error

    def raise_if_any(self) -> None:
        """Raise `error()` if there is a problem."""
        if self._count:
            raise self.error()

    def _error_class(self) -> type[EngineError]:
        base = next(kind for kind in _SEVEREST_FIRST if self._kinds_under(kind))
        found = self._kinds_under(base)
        return found[0] if len(found) == 1 else base

    def _kinds_under(self, base: type[EngineError]) -> list[type[EngineError]]:
        return [kind for kind in self._kinds if issubclass(kind, base)]
