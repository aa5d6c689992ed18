"""Authentication of encrypted connections: ZeroMQ's ZAP protocol, answered on a thread.

ZeroMQ sends one request per connection, after the peer has proved that it has the secret key if the
socket requires one. The answer names the user, and ZeroMQ adds that name to each frame of the
connection.
"""

import contextlib
import threading
from typing import Final

import structlog
import zmq
from zmq.utils import z85

from loradock.controller.server.access.permissions import LOCAL_DOMAIN, LOCAL_USER, Access

_ENDPOINT: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_LOCAL: Final = LOCAL_DOMAIN.encode()
_PARTS: Final = 7
_POLL_MS: Final = 100

log = structlog.get_logger("controller")


class Authenticator:
    """The thread that decides about the connections to one context's sockets."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", access: Access) -> None:
        self._access = access
        self._refused = 0
        self._stopping = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close its socket; connections are then refused."""
        self._stopping.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(_POLL_MS):
                self._answer(self._socket.recv_multipart())

    def _answer(self, message: list[bytes]) -> None:
        peer, empty, *parts = message
        user = self._user_of(parts)
        if user is None:
            self._note_refusal(parts)
        request_id = parts[1] if len(parts) > 1 else b""
        status, text = (b"400", b"not allowed") if user is None else (b"200", b"")
        reply = [peer, empty, _VERSION, request_id, status, text, (user or "").encode(), b""]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(reply, zmq.NOBLOCK)

    def _user_of(self, parts: list[bytes]) -> str | None:
        """Return the user of a request: version, id, domain, address, identity, mechanism, key."""
        if parts[:1] != [_VERSION]:
            return None
        if parts[2:] and parts[2] == _LOCAL:
            return LOCAL_USER
        if len(parts) != _PARTS or parts[5] != b"CURVE":
            return None
        public = z85.encode(parts[6]).decode()
        return self._access.user_of(parts[2].decode(errors="replace"), public)

    def _note_refusal(self, parts: list[bytes]) -> None:
        """Log the first, second, fourth, eighth..., so that a flood does not fill a disk."""
        self._refused += 1
        if self._refused.bit_count() == 1:
            domain, address = [*parts, b"", b"", b"", b""][2:4]
            log.warning(
                "a connection was refused: its key is not allowed here",
                socket=domain.decode(errors="replace"),
                address=address.decode(errors="replace"),
                count=self._refused,
            )
