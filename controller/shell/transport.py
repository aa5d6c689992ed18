"""The controller's sockets and its poller.

`requests.sock` is a ROUTER for clients, `engine.sock` a ROUTER for the engine's DEALER,
`events.sock` a PUB. All are `ipc://` in a directory that only its user can enter. Only `poll`
waits: no send and no receive blocks.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog
import zmq

from controller.shell.connection_guard import ConnectionGuard, GuardThread
from controller.shell.unread_replies import LONG_REPLY_BYTES, UnreadReplies, UnsentReplies
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
# A peer that connects and is silent is disconnected after this time.
_HANDSHAKE_MS: Final = 2000
# Connections that the system queues for `accept` are accepted also when new ones are refused.
_BACKLOG: Final = 32
# Bound on the open descriptors when clients are refused, however many the system allows.
_DESCRIPTORS_MAX: Final = 16_384
# Bound on the connections that are accepted before the guard runs: ZeroMQ's thread waits while
# 1,001 events of one of the three sockets are unread.
_UNGUARDED_MAX: Final = 3 * (1001 + _BACKLOG)
UNSENT_CLIENTS_MAX: Final = 64
"""Bound on the clients that replies wait for."""

DESCRIPTORS_SAFE: Final = 4096
"""Where the process may have this number of descriptors, connections do not exhaust them."""


log = structlog.get_logger("controller")


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
        self._monitored: list[str] = []
        self._poller = zmq.Poller()
        requests = self._open(zmq.ROUTER, _REQUEST_BYTES_HARD_MAX, _REQUESTS_QUEUED_MAX)
        engine = self._open(zmq.ROUTER, REPORTS.bytes_max, _QUEUE_FRAMES_MAX)
        events = self._open(zmq.PUB, FRAME_BYTES_MAX, _QUEUE_FRAMES_MAX)
        self._requests = self._bind(requests, endpoint(directory, "requests.sock"))
        self._engine = self._bind(engine, endpoint(directory, "engine.sock"))
        self._events = self._bind(events, endpoint(directory, "events.sock"))
        # Replies to a client that is gone are refused instead of dropped silently, and so are those
        # to a client whose queue is full.
        self._requests.router_mandatory = 1
        self._replies: dict[bytes, UnsentReplies] = {}
        self._unread = UnreadReplies()
        # Long replies are not copied by pyzmq, so that their release can be observed.
        self._requests.copy_threshold = LONG_REPLY_BYTES
        self._guard = self._guard_connections(run)
        self._poller.register(self._requests, zmq.POLLIN)
        self._poller.register(self._engine, zmq.POLLIN)

    def _open(self, kind: int, frame_bytes_max: int, received_max: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm, socket.rcvhwm = _QUEUE_FRAMES_MAX, received_max
        socket.maxmsgsize = frame_bytes_max
        socket.handshake_ivl, socket.backlog = _HANDSHAKE_MS, _BACKLOG
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", address: str) -> "zmq.Socket[bytes]":
        # Before the first connection: none is accepted until the guard is connected.
        self._monitored.append(f"inproc://accepted-{len(self._monitored)}")
        socket.monitor(self._monitored[-1], zmq.EVENT_ACCEPTED)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise TransportError(f"{address}: {error}") from error
        return socket

    def _guard_connections(self, run: Path) -> GuardThread:
        """Refuse clients from a number of open descriptors on, the engine from twice that number.

        The others are for what is accepted before the guard runs. Where the process may have few
        descriptors, the guard has to run before a burst of connections takes them.
        """
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most < DESCRIPTORS_SAFE:
            log.warning(
                "few descriptors: a burst of connections can end this process; raise `ulimit -n`",
                allowed=most,
                needed=DESCRIPTORS_SAFE,
            )
        most_open = most - _UNGUARDED_MAX if most >= DESCRIPTORS_SAFE else most // 2
        high = min(most_open // 2, _DESCRIPTORS_MAX)
        guards = (
            ConnectionGuard((run / "requests.sock", run / "events.sock"), high),
            ConnectionGuard((run / "engine.sock",), 2 * high),
        )
        poller = zmq.Poller()
        for address in self._monitored:
            monitor = self._context.socket(zmq.PAIR)
            monitor.rcvhwm = 1
            monitor.connect(address)
            poller.register(monitor, zmq.POLLIN)
        return GuardThread(guards, lambda timeout_ms: _accepted(poller, timeout_ms))

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
        """Send to a client at the next `flush`."""
        unsent = self._replies.get(client)
        if unsent is None:
            unsent = self._replies[client] = UnsentReplies()
        unsent.add(frame)

    def can_reply(self, client: bytes) -> bool:
        """Whether a long reply to this client would be sent: it has read enough earlier ones."""
        return self._unread.allows(client, LONG_REPLY_BYTES)

    def flush(self) -> None:
        """Send all replies at once: one by one, each would wake the sending thread.

        Those to a client that has too much to read wait for the next `flush`, up to a bound. Beyond
        it they are dropped: a repeated request is answered again.
        """
        replies, self._replies = self._replies, {}
        for client, unsent in replies.items():
            while unsent.frames and self._try_reply(client, unsent.frames[0]):
                unsent.remove_first()
            if unsent.frames and len(self._replies) < UNSENT_CLIENTS_MAX:
                unsent.drop_beyond_bound()
                self._replies[client] = unsent

    def _try_reply(self, client: bytes, frame: bytes) -> bool:
        """Send a reply; False if the client has to read others first."""
        is_long = len(frame) >= LONG_REPLY_BYTES
        if is_long and not self._unread.allows(client, len(frame)):
            return False
        try:
            self._requests.send(client, _NO_WAIT_MORE)
            tracker = self._requests.send(frame, _NO_WAIT, copy=not is_long, track=is_long)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return True
        if tracker is not None:
            self._unread.add(client, tracker, len(frame))
        return True

    def command(self, engine: bytes, frame: bytes) -> None:
        """Send to an engine; a loss is detected as a gap in the frames' numbers."""
        _send(self._engine, engine, frame)

    def publish(self, frame: bytes) -> None:
        """Send to every subscriber; a loss is detected as a gap in the events' numbers."""
        with contextlib.suppress(zmq.Again):
            self._events.send(frame, _NO_WAIT)

    def close(self) -> None:
        """Close all sockets at once."""
        # The guard reads until the end: ZeroMQ's thread waits while events are unread.
        for socket in (self._requests, self._engine, self._events):
            socket.monitor(None, 0)
        self._guard.stop()
        self._context.destroy(linger=0)

    def __enter__(self) -> "Transport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(socket: "zmq.Socket[bytes]") -> Iterator[tuple[bytes, bytes]]:
    size = 0
    in_message = bool(socket.getsockopt(zmq.RCVMORE))
    for _ in range(FRAMES_PER_ITERATION):
        if size >= BYTES_PER_ITERATION:
            return
        try:
            # One part per call: pyzmq's calls for whole messages take five times as long.
            part = socket.recv(_NO_WAIT)
        except zmq.Again:
            return
        if in_message:
            # The rest of a refused message is read within the bounds too, and dropped.
            size += len(part)
            in_message = bool(socket.getsockopt(zmq.RCVMORE))
            continue
        frame = socket.recv(_NO_WAIT)
        size += len(frame)
        in_message = bool(socket.getsockopt(zmq.RCVMORE))
        # A message has one frame: any other is malformed, and decoding refuses it.
        yield part, b"" if in_message else frame


def _accepted(poller: zmq.Poller, timeout_ms: int) -> int:
    """Return the number of connections accepted since the last call, after waiting for one."""
    accepted = 0
    for monitor, _ in poller.poll(timeout_ms):
        with contextlib.suppress(zmq.Again):
            while True:
                monitor.recv(_NO_WAIT)
                accepted += not monitor.getsockopt(zmq.RCVMORE)
    return accepted


def _send(socket: "zmq.Socket[bytes]", peer: bytes, frame: bytes) -> None:
    try:
        socket.send(peer, _NO_WAIT_MORE)
        socket.send(frame, _NO_WAIT)
    except zmq.Again:
        return
