"""Refusal of connections before the process has no file descriptor left, and of those that flood.

ZeroMQ accepts connections on its own thread and aborts the process when `accept` fails for lack of
descriptors. Nothing makes it stop accepting at once but the absence of the sockets' files: a thread
that is woken by each accepted connection renames them while too many descriptors are open.

ZeroMQ bounds messages by number and their parts by size, but neither the parts of a message nor the
subscriptions of a peer, of which a byte costs 50 to 80 bytes. The same thread compares what the
system has received on each remote connection with what the controller has read from it.
"""

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

_CHECK_MS: Final = 250
"""Interval of checks without a new connection."""

_FLOOD_CHECK_MS: Final = 50
"""The same with remote connections, of which one can begin to flood."""

_TRIM_S: Final = 2.0
"""Time after the end of a flood in which ZeroMQ frees its memory, before the allocator returns it.
"""

SUBSCRIBER_BYTES_MAX: Final = 16 << 10
"""Bound on the bytes that a remote subscriber sends: its handshake, one subscription, heartbeats.

A connection that reaches it is ended, after about an hour of heartbeats; subscribers connect again
and fetch the events that they have missed.
"""

_BYTES_RECEIVED: Final = struct.Struct("=Q")
_BYTES_RECEIVED_AT: Final = 128
"""Offset of `tcpi_bytes_received` in the `tcp_info` of Linux."""

HIDDEN: Final = ".full"
"""Suffix of a socket's file while new connections are refused."""

log = structlog.get_logger("controller")


def open_descriptors() -> int:
    """Return the number of open file descriptors of this process."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        # The listing needs a descriptor, and none is left.
        return sys.maxsize


class ConnectionGuard:
    """Hides sockets' files from the moment that `descriptors_max` descriptors are open.

    They return when an eighth of these descriptors is free again. If they can't be renamed, new
    connections are ended meanwhile.
    """

    def __init__(
        self,
        files: Iterable[Path],
        descriptors_max: int,
        count: Callable[[], int] = open_descriptors,
    ) -> None:
        self._files = tuple(files)
        self._high = descriptors_max
        self._low = descriptors_max - descriptors_max // 8
        self._count = count
        self.is_hidden = False
        self._ends_connections = False
        # New connections until the next count: fewer can't reach the bound.
        self._until_count = 0
        for path in self._files:
            _hidden(path).unlink(missing_ok=True)

    check_ms: Final = _CHECK_MS

    def on_accepted(self, descriptors: Sequence[int]) -> None:
        """Handle new connections; none: time has passed."""
        self._until_count -= len(descriptors)
        if self.is_hidden or self._until_count <= 0:
            self._check()
        if self._ends_connections:
            _end_connections(descriptors)

    def show(self) -> None:
        """Let the sockets be found again."""
        if self.is_hidden:
            for path in self._files:
                _rename(_hidden(path), path)
        self.is_hidden = self._ends_connections = False

    def _check(self) -> None:
        count = self._count()
        self._until_count = max(1, self._high - count)
        if not self.is_hidden and count >= self._high:
            renamed = [_rename(path, _hidden(path)) for path in self._files]
            self.is_hidden, self._ends_connections = True, not all(renamed)
            log.warning("too many connections: new ones are refused", descriptors=count)
        elif self.is_hidden and count <= self._low:
            self.show()
            log.info("new connections are accepted again", descriptors=count)


class RemoteGuard:
    """Ends new remote connections while `descriptors_max` descriptors are open, and floods.

    A port can't be hidden as a file can; its peers find their connections closed and try again.
    `bytes_max`: by local port, the bytes of a connection that can be unread. `read` has the bytes
    that were read, by descriptor; those of subscribers are not in it, so all of them count.
    """

    def __init__(
        self,
        descriptors_max: int,
        bytes_max: Mapping[int, int],
        read: dict[int, int],
    ) -> None:
        self._high = descriptors_max
        self._until_count = 0
        self._bytes_max = bytes_max
        self._read = read
        # The peers of the connections by descriptor: its number can be used again.
        self._peers: dict[int, object] = {}
        self._trim_at_s = 0.0

    @property
    def check_ms(self) -> int:
        """The time after which `on_accepted` is called again, without a new connection too."""
        return _FLOOD_CHECK_MS if self._peers or self._trim_at_s else _CHECK_MS

    def on_accepted(self, descriptors: Sequence[int]) -> None:
        """End these connections if there are too many, and any that flood."""
        self._end_new(descriptors)
        for descriptor in descriptors:
            self._read.pop(descriptor, None)
            with _connection(descriptor) as connection:
                if connection is not None and connection.family != socket.AF_UNIX:
                    self._peers[descriptor] = connection.getpeername()
        for descriptor, peer in [*self._peers.items()]:
            if not self._check_flood(descriptor, peer):
                del self._peers[descriptor]
        if self._trim_at_s and time.monotonic() >= self._trim_at_s:
            self._trim_at_s = 0.0
            _return_memory()

    def _check_flood(self, descriptor: int, peer: object) -> bool:
        """Return whether a connection is still there and within its bound; end it beyond."""
        with _connection(descriptor) as connection:
            if connection is None or connection.getpeername() != peer:
                return False
            bytes_max = self._bytes_max.get(connection.getsockname()[1])
            if bytes_max is None:
                return False
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            (received,) = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)
            if received - self._read.get(descriptor, 0) <= bytes_max:
                return True
            connection.shutdown(socket.SHUT_RDWR)
            log.warning("a remote connection is ended: it sent too much", peer=str(peer))
            self._trim_at_s = time.monotonic() + _TRIM_S
        return False

    def _end_new(self, descriptors: Sequence[int]) -> None:
        self._until_count -= len(descriptors)
        if not descriptors or self._until_count > 0:
            return
        count = open_descriptors()
        self._until_count = max(1, self._high - count)
        if count >= self._high:
            log.warning("too many connections: remote ones are ended", descriptors=count)
            _end_connections(descriptors)

    def show(self) -> None:
        """Do nothing: nothing is hidden."""


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield a connection without owning its descriptor; None once it is closed.

    Its owner, another thread, can close it meanwhile: the errors of that are ignored.
    """
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        yield None
        return
    try:
        with contextlib.suppress(OSError):
            yield connection
    finally:
        connection.detach()


def _return_memory() -> None:
    """Have the allocator return freed memory to the system, if it can."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _end_connections(descriptors: Sequence[int]) -> None:
    """Shut connections down; their owner, another thread, can have closed them meanwhile."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            copy = os.dup(descriptor)
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                # What has the number now is no connection, and the copy has no owner.
                os.close(copy)
                continue
            with connection:
                connection.shutdown(socket.SHUT_RDWR)


class GuardThread:
    """Drives guards by the connections that are accepted.

    `wait(timeout_ms)` returns their descriptors since its last call, at the latest after that time.
    """

    def __init__(
        self,
        guards: tuple[ConnectionGuard | RemoteGuard, ...],
        wait: Callable[[int], Sequence[int]],
    ) -> None:
        self._guards = guards
        self._wait = wait
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and let the sockets be found again."""
        self._stopping.set()
        self._thread.join()
        for guard in self._guards:
            guard.show()

    def _run(self) -> None:
        while not self._stopping.is_set():
            accepted = self._wait(min(guard.check_ms for guard in self._guards))
            for guard in self._guards:
                guard.on_accepted(accepted)


def _hidden(path: Path) -> Path:
    return path.with_name(path.name + HIDDEN)


def _rename(path: Path, to: Path) -> bool:
    """Rename a socket's file; False if the directory does not allow that.

    No error may end the thread: ZeroMQ waits for the events that it would not read any more.
    """
    try:
        path.rename(to)
    except FileNotFoundError:
        # It was removed by hand, so no peer finds it.
        return True
    except OSError as error:
        log.warning("a socket's file can't be renamed", path=str(path), error=str(error))
        return False
    return True
