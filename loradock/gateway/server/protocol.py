"""uvicorn's HTTP protocol with bounds on the head of a request, and reports of lost connections."""

import asyncio
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loradock.gateway.http.endpoint import CONNECTION, Watch

_REFUSAL: Final = (
    b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """A connection; `_head_bytes` are those of a head that is not complete yet."""

    head_bytes_max: ClassVar[int]
    head_timeout_s: ClassVar[float]
    unread_timeout_s: ClassVar[float]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._extensions: dict[str, Any] = {CONNECTION: self}
        self._watch: Watch | None = None
        self._is_lost = False

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
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
        self._unread_timer = self.loop.call_later(self.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting for the client."""
        self._stop_unread_timer()
        super().resume_writing()

    @property
    def has_received_all(self) -> bool:
        """Whether no message is incomplete."""
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
            if self._head_timer is None:
                self._start_timer()
        super().data_received(data)
        if self._in_head and self._head_bytes > self.head_bytes_max:
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

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(
            self.head_timeout_s, self._refuse, 408, b"Request Timeout"
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
            self.transport.write(_REFUSAL % (status, reason))
            self.transport.close()


def bounded_protocol(bytes_max: int, timeout_s: float, unread_s: float) -> type[BoundedProtocol]:
    """Return the class of connections whose requests begin, and are read, within these bounds.

    uvicorn has no bounds: an endless head would fill the memory, and a client that
    reads nothing would keep its request for ever.
    """

    class Configured(BoundedProtocol):
        """A connection with these bounds."""

        head_bytes_max = bytes_max
        head_timeout_s = timeout_s
        unread_timeout_s = unread_s

    return Configured
