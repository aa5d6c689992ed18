"""The controller's sockets, and what else it waits for.

What it is: the only file of the controller with zmq, beside the client. What it is not: a protocol;
it moves frames. One rule: no send and no receive ever waits; waiting is `poll`'s alone.

`requests.sock` is a ROUTER for clients, `engine.sock` a ROUTER for the engine's DEALER,
`events.sock` a PUB. All are `ipc://` in a directory that only its user can enter.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq

from messages.wire import FRAME_BYTES_MAX, REPORTS, REQUESTS

FRAMES_PER_TURN: Final = 512
"""The most frames taken from one socket before their group is written: bounds a turn's latency."""

BYTES_PER_TURN: Final = 64 << 20
"""The most bytes of them, but for the last one's: images are copied more than once on their way."""

# The socket drops a peer that sends more in one frame; below it a too long frame is answered.
_REQUEST_BYTES_HARD_MAX: Final = REQUESTS.bytes_max + 8 * FRAME_BYTES_MAX
_PATH_BYTES_MAX: Final = 107
_NO_WAIT: Final = int(zmq.NOBLOCK)
_NO_WAIT_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Frames kept for one peer. Beyond it a client that sends on waits, and one that does not read
# loses answers and events, which it can ask for again. Requests can be long, so that few of them
# are queued: a client that sends nothing but the longest has a little over 1 GiB here.
_REQUESTS_QUEUED_MAX: Final = 32
_QUEUE_FRAMES_MAX: Final = 16_384


class TransportError(Exception):
    """A socket can't be opened here."""


def endpoint(directory: Path, name: str) -> str:
    """The address of one of the controller's sockets; raises `TransportError` if too long."""
    path = (directory / "run" / name).absolute()
    length = len(os.fsencode(path))
    if length > _PATH_BYTES_MAX:
        raise TransportError(
            f"{path} has {length} bytes, a socket's path may have {_PATH_BYTES_MAX}; "
            "choose a shorter directory"
        )
    return f"ipc://{path}"


class Transport:
    """Three bound sockets and a poller; a context manager."""

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
            # A peer that reconnects under its own name takes its place over at once.
            socket.router_handover = 1
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", address: str) -> "zmq.Socket[bytes]":
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise TransportError(f"{address}: {error}") from error
        return socket

    def watch(self, fd: int) -> None:
        """Let `poll` wake for this file descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._poller.unregister(fd)

    def poll(self, timeout_ms: int) -> set[int]:
        """Wait for a frame or a watched descriptor; returns the descriptors that are ready."""
        ready = self._poller.poll(timeout_ms)
        return {source for source, _ in ready if isinstance(source, int)}

    def receive_requests(self) -> Iterator[tuple[bytes, bytes]]:
        """(client, frame) for what clients sent, up to the bound of a turn."""
        return _receive(self._requests)

    def receive_reports(self) -> Iterator[tuple[bytes, bytes]]:
        """(engine, frame) for what engines sent, up to the bound of a turn."""
        return _receive(self._engine)

    def reply(self, client: bytes, frame: bytes) -> None:
        """Send to a client at the next `flush`; one that does not read loses it and asks again."""
        self._replies.append((client, frame))

    def flush(self) -> None:
        """Send a turn's replies in one go: one by one, each would wake the sending thread anew."""
        for client, frame in self._replies:
            _send(self._requests, client, frame)
        self._replies.clear()

    def command(self, engine: bytes, frame: bytes) -> None:
        """Send to an engine; a loss shows as a gap in the frames' numbers."""
        _send(self._engine, engine, frame)

    def publish(self, frame: bytes) -> None:
        """Send to every subscriber; a loss shows as a gap in the events' numbers."""
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
    for _ in range(FRAMES_PER_TURN):
        if size >= BYTES_PER_TURN:
            return
        try:
            # Part by part: pyzmq's calls for whole messages take five times as long.
            peer = socket.recv(_NO_WAIT)
        except zmq.Again:
            return
        frame = socket.recv(_NO_WAIT)
        while socket.getsockopt(zmq.RCVMORE):
            # One frame a message: anything else is malformed, and decoding says so.
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
