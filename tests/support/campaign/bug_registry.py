"""The registry of planted bugs.

A planted bug is a function that returns the replaced attribute's owner, its name and the defective
value.
"""

from collections.abc import Callable
from typing import Any, Final

Replacement = tuple[Any, str, Any]
"""An owner, the name of its attribute, and the defective value."""

BUGS: Final[dict[str, Callable[[], Replacement]]] = {}
"""All planted bugs by name."""


def bug(make: Callable[[], Replacement]) -> Callable[[], Replacement]:
    """Register a planted bug under the name of its function."""
    BUGS[make.__name__] = make
    return make


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the defect of a step that is left out."""
