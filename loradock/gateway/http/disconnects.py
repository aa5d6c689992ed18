"""The end of a request whose client leaves: its task is cancelled.

The gateway's own protocol calls when a connection is lost. Under another server a task waits for
that, which costs about a tenth of a short request.
"""

import asyncio

from starlette.types import Receive, Scope

from loradock.gateway.http.connection import Connection, connection_of


class Watch:
    """Cancels the current task when its client leaves, until `end`."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._has_left = False

    def on_left(self) -> None:
        """Cancel the task."""
        self._has_left = True
        if self._task is not None:
            self._task.cancel()

    def take_cancellation(self) -> bool:
        """Whether the cancellation of the task is this one and no other; it then counts as over."""
        return self._has_left and self._task is not None and self._task.uncancel() == 0

    def end(self) -> None:
        """Stop watching."""


class _ConnectionWatch(Watch):
    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        connection.set_on_lost(self.on_left)

    def end(self) -> None:
        self._connection.set_on_lost(None)


class _TaskWatch(Watch):
    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self._watching = asyncio.ensure_future(self._wait(receive))

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.on_left()

    def end(self) -> None:
        self._watching.cancel()


def watch_of(scope: Scope, receive: Receive) -> Watch:
    """Begin to watch the client of a request whose body was read, for the current task."""
    connection = connection_of(scope)
    return _TaskWatch(receive) if connection is None else _ConnectionWatch(connection)
