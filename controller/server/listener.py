"""Bound sockets for requests, engines and events, and the authentication of their connections.

Local sockets are `ipc://` in a directory that only its user can enter, and accept connections of
that user alone. Remote ones are `tcp://` at three consecutive ports. All remote connections and
every connection to the socket for engines are encrypted and authenticated by CURVE; a frame of them
carries its user. The others are admitted by the same thread, although all are: only with that does
ZeroMQ refuse a peer of its protocols before the third, which no limit on the handshake would end.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import zmq
from zmq.utils import z85

from loradock.controller.server.access import (
    ENGINE_DOMAIN,
    EVENTS_DOMAIN,
    LOCAL_DOMAIN,
    LOCAL_USER,
    REQUESTS_DOMAIN,
    Access,
)
from loradock.controller.server.connection_guard import SUBSCRIBER_BYTES_MAX
from loradock.messages.addresses import (
    ENGINE_PORT_OFFSET,
    EVENTS_PORT_OFFSET,
    REVOKED_STATUS,
    endpoint,
    with_port_offset,
)
from loradock.messages.wire import FRAME_BYTES_MAX, REPORTS, REQUESTS
from loradock.processes.key_files import KeyPair

LONG_REPLY_BYTES: Final = 4096
"""Replies of this size and more are counted; the bound in frames suffices for shorter ones."""

FRAMES_PER_ITERATION: Final = 512
"""Bound on the frames read from one socket per iteration of the main loop; bounds its latency."""

BYTES_PER_ITERATION: Final = 64 << 20
"""Bound on their bytes; the last frame can exceed it. Images are copied more than once."""

BACKLOG: Final = 32
"""Connections that the system queues for `accept` are accepted also when new ones are refused."""

SUBSCRIPTION_BYTES_MAX: Final = 1024
"""Bound on a frame from a subscriber; those of the handshake are longer than a subscription."""

UNREAD_REQUESTS_BYTES_MAX: Final = 256 << 20
"""Bound on what a remote client has sent and is not read yet, in messages or in parts of one."""

# ZeroMQ disconnects a peer that sends a longer frame; a shorter one that is too long is answered.
_REQUEST_BYTES_HARD_MAX: Final = REQUESTS.bytes_max + 8 * FRAME_BYTES_MAX

_CURVE_BYTES: Final = 42
"""The most bytes that ZeroMQ and CURVE add to a frame."""

_NO_WAIT: Final = int(zmq.NOBLOCK)

# Bounds on the frames queued per peer. A client that sends more has to wait; one that does not read
# loses replies and events, which it can request again. The sender learns that frames were
# read after half of the bound, so a local client with 64 requests in flight never waits: with a
# bound of 32 it was answered a sixth slower.
_REMOTE_REQUESTS_QUEUED_MAX: Final = 32

_LOCAL_REQUESTS_QUEUED_MAX: Final = 128

_QUEUE_FRAMES_MAX: Final = 16_384

# A peer that connects and is silent is disconnected after this time.
_HANDSHAKE_MS: Final = 2000

# A remote peer that has vanished without closing its connection is disconnected after this time.
_REMOTE_SILENCE_MS: Final = 30_000

_EVENT: Final = struct.Struct("=Hi")

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"

_ZAP_VERSION: Final = b"1.0"

_LOCAL_DOMAIN: Final = LOCAL_DOMAIN.encode()

_ZAP_PARTS: Final = 7
_UNKNOWN_STATUS: Final = 400

_POLL_MS: Final = 100

log = structlog.get_logger("controller")


class TransportError(Exception):
    """A socket can't be opened at this address."""


class Addresses(NamedTuple):
    """Where the three sockets are bound."""

    requests: str
    engine: str
    events: str


def local_addresses(directory: Path) -> Addresses:
    """Return the addresses of the sockets in a directory; raises `TransportError` if too long."""
    names = ("requests.sock", "engine.sock", "events.sock")
    try:
        return Addresses(*[endpoint(directory.absolute(), name) for name in names])
    except ValueError as error:
        raise TransportError(str(error)) from error


def remote_addresses(address: str) -> Addresses:
    """Return the addresses at three consecutive ports; raises `ValueError`."""
    return Addresses(
        with_port_offset(address, 0),
        with_port_offset(address, ENGINE_PORT_OFFSET),
        with_port_offset(address, EVENTS_PORT_OFFSET),
    )


def own_user() -> int:
    """Return the only user whose processes can connect to local sockets."""
    return os.geteuid()


class Listener:
    """Three bound sockets; raises `TransportError` if one can't be bound.

    `pair`: the controller's keys. With `is_remote`, CURVE is required on all sockets.
    """

    def __init__(
        self, addresses: Addresses, pair: KeyPair, access: Access, *, is_remote: bool
    ) -> None:
        self._context = zmq.Context()
        self._pair = pair
        self._is_remote = is_remote
        self._monitored: list[str] = []
        self._authenticator = Authenticator(self._context, access)
        # The bytes that were read from each remote connection, by its descriptor.
        self.read: dict[int, int] = {}
        try:
            self.requests = self._open(
                zmq.ROUTER, _REQUEST_BYTES_HARD_MAX, REQUESTS_DOMAIN if is_remote else LOCAL_DOMAIN
            )
            self.requests.rcvhwm = (
                _REMOTE_REQUESTS_QUEUED_MAX if is_remote else _LOCAL_REQUESTS_QUEUED_MAX
            )
            # Replies to a client that is gone are refused instead of dropped silently, and so are
            # those to a client whose queue is full.
            self.requests.router_mandatory = 1
            # Long replies are not copied by pyzmq, so that their release can be observed.
            self.requests.copy_threshold = LONG_REPLY_BYTES
            self.engine = self._open(zmq.ROUTER, REPORTS.bytes_max, ENGINE_DOMAIN)
            self.events = self._open(
                zmq.PUB, SUBSCRIPTION_BYTES_MAX, EVENTS_DOMAIN if is_remote else LOCAL_DOMAIN
            )
            sockets = (self.requests, self.engine, self.events)
            self._bound = tuple(zip(sockets, addresses, strict=True))
            for socket, address in self._bound:
                self._bind(socket, address)
        except BaseException:
            self.close()
            raise

    def _open(self, kind: int, frame_bytes_max: int, domain: str) -> "zmq.Socket[bytes]":
        """Return a socket that requires CURVE unless its domain is the local one."""
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = _QUEUE_FRAMES_MAX
        socket.maxmsgsize = frame_bytes_max
        socket.handshake_ivl, socket.backlog = _HANDSHAKE_MS, BACKLOG
        socket.zap_domain = domain.encode()
        if domain != LOCAL_DOMAIN:
            socket.curve_publickey = self._pair.public.encode()
            socket.curve_secretkey = self._pair.secret.encode()
            socket.curve_server = 1
        if self._is_remote:
            socket.heartbeat_ivl = _REMOTE_SILENCE_MS // 3
            socket.heartbeat_timeout = _REMOTE_SILENCE_MS
        else:
            socket.setsockopt(zmq.IPC_FILTER_UID, own_user())
        return socket

    def _bind(self, socket: "zmq.Socket[bytes]", address: str) -> None:
        # Before the first connection: none is accepted until the guard is connected.
        self._monitored.append(f"inproc://accepted-{len(self._monitored)}")
        socket.monitor(self._monitored[-1], zmq.EVENT_ACCEPTED)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise TransportError(f"{address}: {error}") from error

    def bind_missing(self, found: Container[str]) -> Iterator[str]:
        """Bind local sockets again whose files have none of the names `found`, and yield them.

        Their connections stay. If binding fails, the next call tries again.
        """
        for socket, address in self._bound:
            path = address.removeprefix("ipc://")
            if os.path.basename(path) not in found:
                with contextlib.suppress(zmq.ZMQError):
                    socket.unbind(address)
                with contextlib.suppress(zmq.ZMQError):
                    socket.bind(address)
                    yield path

    def accepted(self) -> "AcceptedConnections":
        """Return a reader of the connections that are accepted from now on."""
        return AcceptedConnections(self._context, self._monitored)

    def unread_bytes_max(self) -> dict[int, int]:
        """Return how many bytes of a remote connection can be unread, by local port."""
        requests, engine, events = (int(address.rpartition(":")[2]) for _, address in self._bound)
        return {
            requests: UNREAD_REQUESTS_BYTES_MAX,
            engine: 2 * REPORTS.bytes_max,
            events: SUBSCRIBER_BYTES_MAX,
        }

    def receive_requests(self) -> Iterator[tuple[bytes, str, bytes]]:
        """Yield (peer, user, frame) for requests, up to the bounds of an iteration."""
        if self._is_remote:
            return _authenticated(self.requests, self._user_and_count)
        return receive(self.requests)

    def receive_reports(self) -> Iterator[tuple[bytes, str, bytes]]:
        """Yield (peer, user, frame) for reports, up to the bounds of an iteration."""
        user_of = self._user_and_count if self._is_remote else _user_of
        return _authenticated(self.engine, user_of)

    def _user_and_count(self, frame: zmq.Frame) -> str:
        """Return the user of a frame, and count it for the guard of its connection."""
        descriptor = int(frame.get(zmq.SRCFD))
        self.read[descriptor] = self.read.get(descriptor, 0) + len(frame) + _CURVE_BYTES
        return _user_of(frame)

    def stop_monitoring(self) -> None:
        """Report no more connections; a reader of them has to read until then."""
        for socket in (self.requests, self.engine, self.events):
            socket.monitor(None, 0)

    def close(self) -> None:
        """Close all sockets and their connections at once."""
        self._authenticator.stop()
        self._context.destroy(linger=0)


class AcceptedConnections:
    """The connections that a listener accepts, for a separate thread."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", addresses: list[str]) -> None:
        self._poller = zmq.Poller()
        for address in addresses:
            monitor = context.socket(zmq.PAIR)
            monitor.rcvhwm = 1
            monitor.connect(address)
            self._poller.register(monitor, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> list[int]:
        """Return the descriptors accepted since the last call, after waiting for one."""
        descriptors = []
        for monitor, _ in self._poller.poll(timeout_ms):
            try:
                while True:
                    part = monitor.recv(_NO_WAIT)
                    if monitor.getsockopt(zmq.RCVMORE):
                        descriptors.append(_EVENT.unpack(part)[1])
            except zmq.Again:
                continue
        return descriptors


def _authenticated(
    socket: "zmq.Socket[bytes]", user_of: Callable[[zmq.Frame], str]
) -> Iterator[tuple[bytes, str, bytes]]:
    """Return the frames of `receive` that have a user."""
    return (received for received in receive(socket, user_of) if received[1])


def _user_of(frame: zmq.Frame) -> str:
    """Return the user of the connection of a frame; an empty text without one."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _local_user(_frame: zmq.Frame) -> str:
    return LOCAL_USER


def receive(
    socket: "zmq.Socket[bytes]", user_of: Callable[[zmq.Frame], str] = _local_user
) -> Iterator[tuple[bytes, str, bytes]]:
    """Yield (peer, user, frame) up to the bounds of an iteration."""
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
        # Its attributes cost less than the socket's options do.
        frame = socket.recv(_NO_WAIT, copy=False)
        size += len(frame)
        in_message = frame.more
        # A message has one frame: any other is malformed, and decoding refuses it.
        yield part, user_of(frame), b"" if in_message else frame.bytes


class Authenticator:
    """The thread that decides about the connections to one context's sockets."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", access: Access) -> None:
        self._access = access
        self._refused = 0
        self._stopping = threading.Event()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)
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
        status, text = b"200", b""
        if user is None:
            self._log_refusal(parts)
            status, text = str(self._refusal_status(parts)).encode(), b"not allowed"
        request_id = parts[1] if len(parts) > 1 else b""
        reply = [peer, empty, _ZAP_VERSION, request_id, status, text, (user or "").encode(), b""]
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(reply, zmq.NOBLOCK)

    def _user_of(self, parts: list[bytes]) -> str | None:
        """Return the user of a request: version, id, domain, address, identity, mechanism, key."""
        if parts[:1] != [_ZAP_VERSION]:
            return None
        if parts[2:] and parts[2] == _LOCAL_DOMAIN:
            return LOCAL_USER
        if len(parts) != _ZAP_PARTS or parts[5] != b"CURVE":
            return None
        public = z85.encode(parts[6]).decode()
        return self._access.user_of(parts[2].decode(errors="replace"), public)

    def _refusal_status(self, parts: list[bytes]) -> int:
        """Return the status for a connection that is refused; it has proved to have its key."""
        is_curve = len(parts) == _ZAP_PARTS and parts[5] == b"CURVE"
        is_revoked = is_curve and self._access.is_revoked(z85.encode(parts[6]).decode())
        return REVOKED_STATUS if is_revoked else _UNKNOWN_STATUS

    def _log_refusal(self, parts: list[bytes]) -> None:
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
