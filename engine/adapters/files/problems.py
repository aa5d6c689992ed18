"""Everything that is wrong with one adapter, told in one error.

What it is: a bounded list. What it is not: a check. One rule: what a file says is shown in ASCII
and cut short, so that any error can be logged, sent and read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from engine.errors import AdapterConfigRefused, AdapterDoesNotFit, EngineError, NotFinite

_SHOWN_MAX: Final = 160
_SEVEREST_FIRST: Final = (AdapterConfigRefused, AdapterDoesNotFit, NotFinite)


def shown(value: object) -> str:
    """A value from a file as it may stand in a text."""
    return _cut(ascii(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}... ({len(text)} characters)"


class Problems:
    """What was found so far; the first `told_max` are told."""

    def __init__(self, told_max: int) -> None:
        self._told_max = told_max
        self._count = 0
        self._told: list[str] = []
        self._kinds: set[type[EngineError]] = set()

    def add(self, kind: type[EngineError], text: str) -> None:
        """One more problem."""
        self._count += 1
        self._kinds.add(kind)
        if len(self._told) < self._told_max:
            self._told.append(text)

    def __len__(self) -> int:
        return self._count

    def add_each(self, kind: type[EngineError], text: str, names: Sequence[str]) -> None:
        """One more problem, `text`, which all of `names` (ASCII) have; nothing without names."""
        if names:
            told = ", ".join(_cut(name) for name in names[: self._told_max])
            more = len(names) - self._told_max
            self.add(kind, f"{text}: {told}" + (f" and {more} more" if more > 0 else ""))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take what the block raises about the adapter as one more problem, and go on behind it."""
        try:
            yield
        except _SEVEREST_FIRST as error:
            self.add(type(error), str(error))

    def error(self) -> EngineError:
        """One error with all of them; its kind is the first of config, fit, values."""
        more = self._count - len(self._told)
        texts = [*self._told, f"and {more} more"] if more else self._told
        return self._kind()("; ".join(texts))

    def raise_if_any(self) -> None:
        """Raise `error()` unless nothing was found."""
        if self._count:
            raise self.error()

    def _kind(self) -> type[EngineError]:
        family = next(kind for kind in _SEVEREST_FIRST if self._of(kind))
        found = self._of(family)
        return found[0] if len(found) == 1 else family

    def _of(self, family: type[EngineError]) -> list[type[EngineError]]:
        return [kind for kind in self._kinds if issubclass(kind, family)]
