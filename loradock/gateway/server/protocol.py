"""uvicorn's HTTP protocol with bounds on connections and heads, and reports of lost connections.

An answer to a request whose body has not arrived is the last of its connection.
"""

import asyncio
from typing import Any, Final

from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loradock.gateway.http.endpoint import CONNECTION, Watch

_REFUSAL: Final = (
    b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


_CLOSE: Final = (b"connection", b"close")


class Bounds(Struct, frozen=True, kw_only=True):
    """Bounds of connections.

    `connections`: their number. `head_bytes`, `head_s`: of the head of a request. `unread_s`: the
    time in which a client reads nothing of an answer. `linger_s`: the time in which the rest of a
    body is read after its answer, so that the client can read that.
    """

    connections: int
    head_bytes: int
    head_s: float
    unread_s: float
    linger_s: float


class BoundedProtocol(HttpToolsProtocol):
    """A connection within bounds; `_head_bytes` is the size of a head that is not complete yet.

    uvicorn has no bounds: an endless head would fill the memory, and a client that reads nothing
    would keep its request for ever.
    """

    def __init__(self, bounds: Bounds, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._bounds = bounds
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self._extensions: dict[str, Any] = {CONNECTION: self}
        self._watch: Watch | None = None
        self._is_lost = False
        self._is_lingering = False

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections and not self._close_an_idle_one():
            self._refuse(503, b"Service Unavailable")
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and report the loss to the request in progress."""
        self._stop_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)
        self._is_lost = True
        if self._watch is not None:
            self._watch.on_left()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read; one that never does ends its request."""
        super().pause_writing()
        self._stop_unread_timer()
        self._unread_timer = self.loop.call_later(self._bounds.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting for the client."""
        self._stop_unread_timer()
        super().resume_writing()

    @property
    def has_received_all(self) -> bool:
        """Return whether no message is incomplete."""
        return self._in_head

    def set_watch(self, watch: Watch | None) -> None:
        """Report the loss of the connection to a watch, at once if it is lost; None: to none."""
        self._watch = watch
        if watch is not None and self._is_lost:
            watch.on_left()

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head that became too long."""
        if self._in_head:
            self._head_bytes += len(data)
            self._time_begun_head()
        super().data_received(data)
        if not self._in_head:
            self._close_after_early_answer()
        elif self._head_bytes > self._bounds.head_bytes:
            self._refuse(431, b"Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        self.scope["extensions"] = self._extensions
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait for the next head, which may follow at once."""
        self._in_head = True
        super().on_message_complete()
        if self._is_lingering:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one's body."""
        self._since = self.loop.time()
        super().on_response_complete()
        self._time_begun_head()
        if not self._in_head:
            self._is_lingering = True
            # A client that reads to the end does not wait; TLS can't be closed on one side.
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(self._bounds.linger_s, self.transport.close)

    @property
    def _is_idle(self) -> bool:
        """Return whether no request is served or has a complete head."""
        return self._in_head and (self.cycle is None or self.cycle.response_complete)

    def _close_an_idle_one(self) -> bool:
        """Close the connection that has waited longest for a request; False if none waits."""
        others = [
            one
            for one in self.connections
            if isinstance(one, BoundedProtocol) and one is not self and one._is_idle
        ]
        if others:
            min(others, key=lambda one: one._since).transport.close()
        return bool(others)

    def _close_after_early_answer(self) -> None:
        """Have an answer that precedes the end of its request's body say that it is the last."""
        cycle: Any = self.cycle
        if "send" in vars(cycle):
            return
        send = cycle.send

        async def send_last(message: Any) -> None:
            if message["type"] != "http.response.start" or self._in_head:
                await send(message)
                return
            await send({**message, "headers": [*message["headers"], _CLOSE]})
            # It would be closed with bytes unread, and the client lose the answer.
            cycle.keep_alive = True

        cycle.send = send_last

    def _time_begun_head(self) -> None:
        """Begin to wait for the rest of a head; a client can send it while it reads an answer."""
        if self._head_bytes and self._head_timer is None and self._is_idle:
            self._start_timer()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(
            self._bounds.head_s, self._refuse, 408, b"Request Timeout"
        )

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _refuse(self, status: int, reason: bytes) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            # Within an answer it would be read as a part of that.
            if self._is_idle:
                self.transport.write(_REFUSAL % (status, reason))
            self.transport.close()
