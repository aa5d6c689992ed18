"""Answers as streams of server-sent events."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.types import Send

from loradock.gateway.http.errors import HttpError

DONE: Final = b"data: [DONE]\n\n"
"""The end of a stream of the OpenAI protocol."""

_encode = msgspec.json.Encoder().encode
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers would hold the events back.
    (b"x-accel-buffering", b"no"),
]


def data_event(value: Any) -> bytes:
    """Return the event of a value."""
    return b"data: " + _encode(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """Return the event of a value that is named by its `type`."""
    return b"event: %b\n" % str(value["type"]).encode() + data_event(value)


def named_event(name: str, number: int, value: Any) -> bytes:
    """Return an event with a name and a number, from which a reader can continue."""
    return b"event: %b\nid: %d\n" % (name.encode(), number) + data_event(value)


def error_events(error: HttpError) -> bytes:
    """Return the events that end a stream of the OpenAI protocol with an error."""
    return data_event(error.body) + DONE


class ServerSentEvents:
    """An answer whose events are sent as the iterator produces them.

    `close` is awaited when the answer ends, also if the client disconnected.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._events = events
        self._close = close
        self._on_end: Callable[[], None] | None = None

    def ended_by(self, on_end: Callable[[], None]) -> "ServerSentEvents":
        """Return this answer, which calls a function after `close`."""
        self._on_end = on_end
        return self

    async def send(self, send: Send, *, only_head: bool = False) -> None:
        """Send the whole answer, or its head."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async with aclosing(self._events) as events:
                while not only_head and (event := await anext(events, None)) is not None:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._close()
            if self._on_end is not None:
                self._on_end()
