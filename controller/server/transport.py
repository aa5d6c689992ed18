"""The controller's sockets and its poller: local ones, and remote ones if an address is given.

Only `poll` waits: no send and no receive blocks. A peer's route names its socket and its
connection; routes are made by this side, and no connection can take over another one's.

ZeroMQ bounds a client's unread replies in frames, whose sizes differ by a factor of a million. A
long reply is therefore sent with a tracker, which is done once the reply has left this process.
"""

import contextlib
import os
import resource
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import structlog
import zmq

from loradock.controller.server.access import Access
from loradock.controller.server.connection_guard import (
    HIDDEN,
    ConnectionGuard,
    GuardThread,
    RemoteGuard,
)
from loradock.controller.server.keys import KeyStore
from loradock.controller.server.listener import (
    BACKLOG,
    LONG_REPLY_BYTES,
    Listener,
    TransportError,
    local_addresses,
    remote_addresses,
)

__all__ = ["DESCRIPTORS_SAFE", "Transport", "TransportError"]

_NO_WAIT: Final = int(zmq.NOBLOCK)
_NO_WAIT_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
# Bound on the open descriptors when clients are refused, however many the system allows.
_DESCRIPTORS_MAX: Final = 16_384
# Bound on the connections that are accepted before the guard runs: ZeroMQ's thread waits while
# 1,001 events of one of the three sockets are unread.
_UNGUARDED_MAX: Final = 3 * (1001 + BACKLOG)
UNSENT_CLIENTS_MAX: Final = 64
"""Bound on the clients that replies wait for."""

DESCRIPTORS_SAFE: Final = 4096
"""If the process can have this number of descriptors, connections do not exhaust them."""

_REFRESH_NS: Final = 20_000_000
"""Interval at which the list of keys is checked for changes while the main loop runs."""

_FILES_NS: Final = 1_000_000_000
"""Interval at which the local sockets' files are looked for."""

UNREAD_BYTES_PER_CLIENT_MAX: Final = 32 << 20
"""Bound on one client's long replies; only a single reply can be longer."""

UNREAD_BYTES_MAX: Final = 512 << 20
"""Bound on the long replies of all clients; beyond it each client can have one."""

_FORGOTTEN_PER_REPLY: Final = 2
"""The clients whose read replies are forgotten with each reply: more than one reply adds."""

UNSENT_BYTES_PER_CLIENT_MAX: Final = 4 << 20
"""Bound on the replies to one client that wait until it has read others, in bytes."""

_LOCAL: Final = b"l"
_REMOTE: Final = b"r"
"""The first byte of a route: which listener the connection belongs to."""

log = structlog.get_logger("controller")


class Transport:
    """The listeners of a controller and a poller; a context manager that closes them.

    `remote_address`: where clients and engines connect over a network. When a key is revoked, all
    remote connections are closed; those with other keys are accepted again.
    """

    def __init__(
        self, directory: Path, access: Access | None = None, remote_address: str = ""
    ) -> None:
        store = KeyStore(directory)
        self._pair = store.server_pair()
        self.access: Final = access or Access(store)
        self._poller = zmq.Poller()
        self._ready: set[object] = set()
        # Whether the last `poll` saw requests.
        self.has_requests = False
        # To each client the replies that were not sent yet, in order.
        self._replies: dict[bytes, deque[bytes]] = {}
        self._unread = UnreadReplies()
        # Clients whose connections have ended, of the last `flush`.
        self._gone: dict[bytes, None] = {}
        (directory / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remote_address = remote_address
        self._listeners: dict[bytes, Listener] = {}
        local = Listener(local_addresses(directory), self._pair, self.access, is_remote=False)
        self._add(_LOCAL, local)
        self._guards = [self._guard_local(directory / "run", local)]
        self._run = directory / "run"
        self._refreshed_ns = 0
        self._files_ns = time.monotonic_ns()
        self._revocations = self.access.revocations
        if remote_address:
            try:
                self._open_remote()
            except (TransportError, ValueError) as error:
                self.close()
                raise TransportError(str(error)) from error

    def _add(self, letter: bytes, listener: Listener) -> None:
        self._listeners[letter] = listener
        self._poller.register(listener.requests, zmq.POLLIN)
        self._poller.register(listener.engine, zmq.POLLIN)

    def _guard_local(self, run: Path, listener: Listener) -> GuardThread:
        """Refuse clients from a number of open descriptors on, the engine from twice that number.

        The others are for what is accepted before the guard runs. If the process can have few
        descriptors, the guard has to run before a burst of connections takes them.
        """
        high, most = _descriptors_high()
        if most < DESCRIPTORS_SAFE:
            log.warning(
                "few descriptors: a burst of connections can end this process; raise `ulimit -n`",
                allowed=most,
                needed=DESCRIPTORS_SAFE,
            )
        guards = (
            ConnectionGuard((run / "requests.sock", run / "events.sock"), high),
            ConnectionGuard((run / "engine.sock",), 2 * high),
        )
        return GuardThread(guards, listener.accepted().wait)

    def _open_remote(self) -> None:
        addresses = remote_addresses(self._remote_address)
        listener = Listener(addresses, self._pair, self.access, is_remote=True)
        self._add(_REMOTE, listener)
        high = _descriptors_high()[0] // 2
        guard = RemoteGuard(high, listener.unread_bytes_max(), listener.read)
        self._guards.append(GuardThread((guard,), listener.accepted().wait))

    def _close_remote(self) -> None:
        listener = self._listeners.pop(_REMOTE)
        self._poller.unregister(listener.requests)
        self._poller.unregister(listener.engine)
        _close(listener, self._guards.pop())

    def _refresh_access(self) -> None:
        """Apply changes of the list of keys; a revoked key's connections are closed."""
        now = time.monotonic_ns()
        if now - self._refreshed_ns < _REFRESH_NS:
            return
        self._refreshed_ns = now
        self.access.refresh()
        if not self._remote_address:
            return
        if self.access.revocations != self._revocations and _REMOTE in self._listeners:
            self._close_remote()
        if _REMOTE not in self._listeners:
            with contextlib.suppress(TransportError):
                self._open_remote()
        self._revocations = self.access.revocations

    def _bind_missing(self) -> None:
        """Bind local sockets again whose files were removed: no new client would find them."""
        now = time.monotonic_ns()
        if now - self._files_ns < _FILES_NS:
            return
        self._files_ns = now
        try:
            found = {*os.listdir(self._run)}
        except FileNotFoundError:
            found = set()
            with contextlib.suppress(OSError):
                self._run.mkdir(mode=0o700)
        except OSError:
            # Nothing is known: the listing needs a descriptor, and none can be left.
            return
        # Those that the guard hides are found under another name.
        found.update([name.removesuffix(HIDDEN) for name in found])
        for path in self._listeners[_LOCAL].bind_missing(found):
            log.warning("a socket's file was removed; it is bound again", path=path)

    def watch(self, fd: int) -> None:
        """Make `poll` wake for this file descriptor too."""
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._poller.unregister(fd)

    def poll(self, timeout_ms: int) -> set[int]:
        """Wait for a frame or a watched descriptor; return the descriptors that are ready."""
        self._ready = {source for source, _ in self._poller.poll(timeout_ms)}
        self.has_requests = any(
            listener.requests in self._ready for listener in self._listeners.values()
        )
        self._refresh_access()
        self._bind_missing()
        return {source for source in self._ready if isinstance(source, int)}

    def receive_requests(self) -> Iterator[tuple[bytes, str, bytes]]:
        """Yield (route, user, frame) for requests that `poll` saw, up to an iteration's bounds.

        The user is empty for a local connection.
        """
        for letter, listener in self._listeners.items():
            if listener.requests not in self._ready:
                continue
            for peer, user, frame in listener.receive_requests():
                yield letter + peer, user, frame

    def receive_reports(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (route, frame) for reports that `poll` saw, up to the bounds of an iteration."""
        is_engine = self.access.is_engine
        for letter, listener in self._listeners.items():
            if listener.engine not in self._ready:
                continue
            for peer, user, frame in listener.receive_reports():
                # A local engine whose key was revoked stays connected.
                if is_engine(user):
                    yield letter + peer, frame

    def reply(self, route: bytes, frame: bytes) -> None:
        """Send to a client at the next `flush`."""
        self._replies.setdefault(route, deque()).append(frame)

    def can_reply(self, route: bytes) -> bool:
        """Return whether a long reply to this client would be sent: it has read enough earlier
        ones.
        """
        return self._unread.allows(route, LONG_REPLY_BYTES)

    def flush(self) -> Iterable[bytes]:
        """Send all replies at once: one by one, each would wake the sending thread.

        Those to a client that has too much to read wait for the next `flush`, up to a bound. Beyond
        it they are dropped: a repeated request is answered again. Returns the clients whose
        connections have ended, as replies to them have shown.
        """
        if not self._replies:
            return ()
        self._gone.clear()
        replies, self._replies = self._replies, {}
        for route, unsent in replies.items():
            while unsent and self._try_reply(route, unsent[0]):
                unsent.popleft()
            if unsent and len(self._replies) < UNSENT_CLIENTS_MAX:
                size_bytes = sum(map(len, unsent))
                while size_bytes > UNSENT_BYTES_PER_CLIENT_MAX:
                    size_bytes -= len(unsent.pop())
                self._replies[route] = unsent
        return self._gone

    def _try_reply(self, route: bytes, frame: bytes) -> bool:
        """Send a reply; False if the client has to read others first."""
        listener = self._listeners.get(route[:1])
        if listener is None:
            return True
        is_long = len(frame) >= LONG_REPLY_BYTES
        if is_long and not self._unread.allows(route, len(frame)):
            return False
        try:
            listener.requests.send(route[1:], _NO_WAIT_MORE)
            tracker = listener.requests.send(frame, _NO_WAIT, copy=not is_long, track=is_long)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone[route] = None
            return True
        if tracker is not None:
            self._unread.add(route, tracker, len(frame))
        return True

    def is_local(self, route: bytes) -> bool:
        """Return whether a connection is of this machine, where process ids mean the same."""
        return not self._remote_address or route.startswith(_LOCAL)

    def command(self, route: bytes, frame: bytes) -> None:
        """Send to an engine; a loss is detected as a gap in the frames' numbers."""
        listener = self._listeners.get(route[:1])
        if listener is not None:
            _send(listener.engine, route[1:], frame)

    def publish(self, frame: bytes) -> None:
        """Send to every subscriber; a loss is detected as a gap in the events' numbers."""
        for listener in self._listeners.values():
            with contextlib.suppress(zmq.Again):
                listener.events.send(frame, _NO_WAIT)

    def close(self) -> None:
        """Close all sockets at once."""
        for listener, guard in zip(self._listeners.values(), self._guards, strict=True):
            _close(listener, guard)

    def __enter__(self) -> "Transport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(listener: Listener, guard: GuardThread) -> None:
    # The guard reads until the end: ZeroMQ's thread waits while events are unread.
    listener.stop_monitoring()
    guard.stop()
    listener.close()


def _descriptors_high() -> tuple[int, int]:
    """Return from which number of descriptors clients are refused, and how many are allowed."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_open = most - _UNGUARDED_MAX if most >= DESCRIPTORS_SAFE else most // 2
    return min(most_open // 2, _DESCRIPTORS_MAX), most


def _send(socket: "zmq.Socket[bytes]", peer: bytes, frame: bytes) -> None:
    try:
        socket.send(peer, _NO_WAIT_MORE)
        socket.send(frame, _NO_WAIT)
    except zmq.Again:
        return


class UnreadReplies:
    """Long replies that were sent and have not left this process."""

    def __init__(self) -> None:
        self._sent: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._bytes: dict[bytes, int] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        """Return the number of clients with replies that are not known to be read."""
        return len(self._sent)

    def allows(self, client: bytes, size_bytes: int) -> bool:
        """Return whether a reply of this size can be sent to a client now."""
        self._forget_read(client)
        unread = self._bytes.get(client, 0)
        if unread and self.size_bytes + size_bytes > UNREAD_BYTES_MAX:
            for other in tuple(self._sent):
                self._forget_read(other)
        return not unread or (
            unread + size_bytes <= UNREAD_BYTES_PER_CLIENT_MAX
            and self.size_bytes + size_bytes <= UNREAD_BYTES_MAX
        )

    def add(self, client: bytes, tracker: zmq.MessageTracker, size_bytes: int) -> None:
        """Count a reply that was sent.

        A client that has disconnected sends nothing more, so all clients are examined in turn.
        """
        self._sent.setdefault(client, deque()).append((tracker, size_bytes))
        self._bytes[client] = self._bytes.get(client, 0) + size_bytes
        self.size_bytes += size_bytes
        for other in tuple(islice(self._sent, _FORGOTTEN_PER_REPLY)):
            self._sent[other] = self._sent.pop(other)
            self._forget_read(other)

    def _forget_read(self, client: bytes) -> None:
        sent = self._sent.get(client)
        # A client reads its replies in order.
        while sent and sent[0][0].done:
            _, size_bytes = sent.popleft()
            self._bytes[client] -= size_bytes
            self.size_bytes -= size_bytes
        if sent is not None and not sent:
            del self._sent[client], self._bytes[client]
