"""Replies of one iteration: those to one connection share frames."""

from collections.abc import Callable
from typing import Final

from loradock.messages.ids import Epoch
from loradock.messages.requests import Reply
from loradock.messages.wire import BATCH_MAX, REPLIES

SHARED_BYTES_MAX: Final = 1 << 16
"""Bound on the replies that share a frame, in bytes; a longer reply is alone."""

Send = Callable[[bytes, bytes], None]
"""Sends a frame over a connection."""


class Outbox:
    """Encoded replies that wait for the end of the iteration, by connection and in order."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[bytes, list[bytes]] = {}

    def add(self, route: bytes, reply: Reply) -> None:
        """Send a reply over a connection at the next `flush`."""
        body = REPLIES.encode_body(reply)
        waiting = self._waiting.get(route)
        if waiting is None:
            self._waiting[route] = [body]
        else:
            waiting.append(body)

    def flush(self, epoch: Epoch) -> None:
        """Send all replies."""
        for route, bodies in self._waiting.items():
            if len(bodies) == 1:
                self._send(route, REPLIES.join(bodies, epoch))
            else:
                self._send_in_frames(route, bodies, epoch)
        self._waiting.clear()

    def _send_in_frames(self, route: bytes, bodies: list[bytes], epoch: Epoch) -> None:
        first, size = 0, 0
        for index, body in enumerate(bodies):
            if index > first and (
                size + len(body) > SHARED_BYTES_MAX or index - first == BATCH_MAX
            ):
                self._send(route, REPLIES.join(bodies[first:index], epoch))
                first, size = index, 0
            size += len(body)
        self._send(route, REPLIES.join(bodies[first:], epoch))
