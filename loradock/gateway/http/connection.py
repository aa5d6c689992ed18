"""What the gateway's own HTTP protocol reports of a connection beyond ASGI.

It is an ASGI extension of each request; under another server it is missing.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

from starlette.types import Scope

CONNECTION: Final = "loradock.connection"
"""The name of the extension."""


class Connection(Protocol):
    """A connection; it executes one request at a time."""

    @property
    def has_received_all(self) -> bool:
        """Whether no request is incomplete, so that reading a body does not wait."""

    def set_on_lost(self, callback: Callable[[], None] | None) -> None:
        """Call a function when the connection is lost, at once if it is; None: none any more."""


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of a request, if the server reports of it."""
    extensions: dict[str, Any] = scope.get("extensions") or {}
    return extensions.get(CONNECTION)
