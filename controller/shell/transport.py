"""The controller's sockets and its poller.

`requests.sock` is a ROUTER for clients, `engine.sock` a ROUTER for the engine's DEALER,
`events.sock` a PUB. All are `ipc://` in a directory that only its user can enter. Only `poll`
waits: no send and no receive blocks.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq

from messages.wire import FRAME_BYTES_MAX, REPORTS, REQUESTS

FRAMES_PER_ITERATION: Final = 512
"""Bound on the frames read from one socket per iteration of the main loop; bounds its latency."""

BYTES_PER_ITERATION: Final = 64 << 20
"""Bound on their bytes; the last frame may exceed it. Images are copied more than once."""

# ZeroMQ disconnects a peer that sends a longer frame; a shorter one that is too long is answered.
_REQUEST_BYTES_HARD_MAX: Final = REQUESTS.bytes_max + 8 * FRAME_BYTES_MAX
_PATH_BYTES_MAX: Final = 107
_NO_WAIT: Final = int(zmq.NOBLOCK)
_NO_WAIT_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Bounds on the frames queued per peer. A client that sends more has to wait; one that does not read
# loses replies and events, which it can request again. Requests can be long, so few are queued:
# the longest ones of one client take a little over 1 GiB.
_REQUESTS_QUEUED_MAX: Final = 32
_QUEUE_FRAMES_MAX: Final = 16_384


class TransportError(Exception):
    """A socket can't be opened in this directory."""


def endpoint(directory: Path, name: str) -> str:
    """Return the address of a controller's socket; raise `TransportError` if it is too long."""
    path = (directory / "run" / name).absolute()
    length = len(os.fsencode(path))
    if length > _PATH_BYTES_MAX:
        raise TransportError(
            f"{path} has {length} bytes, a socket's path may have at most {_PATH_BYTES_MAX}; "
            "choose a shorter directory"
        )
    return f"ipc://{path}"


class Transport:
    """Three bound sockets and a poller; a context manager that closes them."""

    def __init__(self, directory: Path) -> None:
        run = directory / "run"
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.chmod(0o700)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        requests = self._open(zmq.ROUTER, _REQUEST_BYTES_HARD_MAX, _REQUESTS_QUEUED_MAX)
        engine = self._open(zmq.ROUTER, REPORTS.bytes_max, _QUEUE_FRAMES_MAX)
        events = self._open(zmq.PUB, FRAME_BYTES_MAX, _QUEUE_FRAMES_MAX)
        self._requests = self._bind(requests, endpoint(directory, "requests.sock"))
        self._engine = self._bind(engine, endpoint(directory, "engine.sock"))
        self._events = self._bind(events, endpoint(directory, "events.sock"))
        self._replies: list[tuple[bytes, bytes]] = []
        self._poller.register(self._requests, zmq.POLLIN)
        self._poller.register(self._engine, zmq.POLLIN)

    def _open(self, kind: int, frame_bytes_max: int, received_max: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm, socket.rcvhwm = _QUEUE_FRAMES_MAX, received_max
        socket.maxmsgsize = frame_bytes_max
        if kind == zmq.ROUTER:
            # A peer that reconnects with its own name replaces the old connection at once.
            socket.router_handover = 1
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", address: str) -> "zmq.Socket[bytes]":
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise TransportError(f"{address}: {error}") from error
        return socket

    def watch(self, fd: int) -> None:
        """Make `poll` wake for this file descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._poller.unregister(fd)

    def poll(self, timeout_ms: int) -> set[int]:
        """Wait for a frame or a watched descriptor; return the descriptors that are ready."""
        ready = self._poller.poll(timeout_ms)
        return {source for source, _ in ready if isinstance(source, int)}

    def receive_requests(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (client, frame) for requests, up to the bounds of an iteration."""
        return _receive(self._requests)

    def receive_reports(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (engine, frame) for reports, up to the bounds of an iteration."""
        return _receive(self._engine)

    def reply(self, client: bytes, frame: bytes) -> None:
        """Send to a client at the next `flush`; dropped if the client's queue is full."""
        self._replies.append((client, frame))

    def flush(self) -> None:
        """Send all replies at once: one by one, each would wake the sending thread."""
        for client, frame in self._replies:
            _send(self._requests, client, frame)
        self._replies.clear()

    def command(self, engine: bytes, frame: bytes) -> None:
        """Send to an engine; a loss is detected as a gap in the frames' numbers."""
        _send(self._engine, engine, frame)

    def publish(self, frame: bytes) -> None:
        """Send to every subscriber; a loss is detected as a gap in the events' numbers."""
        with contextlib.suppress(zmq.Again):
            self._events.send(frame, _NO_WAIT)

    def close(self) -> None:
        """Close all sockets at once."""
        self._context.destroy(linger=0)

    def __enter__(self) -> "Transport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(socket: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, bytes]]:
    size = 0
    for _ in range(FRAMES_PER_ITERATION):
        if size >= BYTES_PER_ITERATION:
            return
        try:
            # One part per call: pyzmq's calls for whole messages take five times as long.
            peer = socket.recv(_NO_WAIT)
        except zmq.Again:
            return
        frame = socket.recv(_NO_WAIT)
        while socket.getsockopt(zmq.RCVMORE):
            # A message has one frame: any other is malformed, and decoding refuses it.
            socket.recv(_NO_WAIT)
            frame = b""
        size += len(frame)
        yield peer, frame


def _send(socket: "zmq.Socket[bytes]", peer: bytes, frame: bytes) -> None:
    try:
        socket.send(peer, _NO_WAIT_MORE)
        socket.send(frame, _NO_WAIT)
    except zmq.Again:
        return
