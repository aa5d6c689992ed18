"""Stand-ins for names that a version of the library lacks, so that the engine starts without them.

Using one fails like a model's own code that is called in an unsupported way, so the startup check
that needs it is refused, with the name in its reason, and a slower way to run rows is chosen.
"""

from functools import cache
from types import ModuleType
from typing import Any


class NameAbsent(AttributeError):  # noqa: N818 - named by what was found, as the engine's errors
    """This version of the library has no such name."""


class _StandIn:
    """A class of which there are no objects; calling a function that is absent is the same."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NameAbsent(f"this version of transformers has no {type(self).__name__}")

    @classmethod
    def register(cls, *_: object) -> None:
        """Ignore an implementation, which nothing can choose."""


@cache
def find(module: ModuleType, name: str) -> Any:
    """Return an attribute of a module of the library, or a class that stands in for it."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(module, name)
    except (ImportError, AttributeError):
        return type(name, (_StandIn,), {})
