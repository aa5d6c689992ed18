"""Refusal of connections before the process has no file descriptor left.

ZeroMQ accepts connections on its own thread and aborts the process when `accept` fails for lack of
descriptors. Nothing makes it stop accepting at once but the absence of the sockets' files: a thread
that is woken by each accepted connection renames them while too many descriptors are open.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog

_CHECK_MS: Final = 250
"""Interval of checks without a new connection."""

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
    """Ends new remote connections while `descriptors_max` descriptors are open.

    A port can't be hidden as a file can; its peers find their connections closed and try again.
    """

    def __init__(self, descriptors_max: int, count: Callable[[], int] = open_descriptors) -> None:
        self._high = descriptors_max
        self._count = count
        self._until_count = 0

    def on_accepted(self, descriptors: Sequence[int]) -> None:
        """End these connections if there are too many."""
        self._until_count -= len(descriptors)
        if not descriptors or self._until_count > 0:
            return
        count = self._count()
        self._until_count = max(1, self._high - count)
        if count >= self._high:
            log.warning("too many connections: remote ones are ended", descriptors=count)
            _end_connections(descriptors)

    def show(self) -> None:
        """Do nothing: nothing is hidden."""


def _end_connections(descriptors: Sequence[int]) -> None:
    """Shut connections down; their owner, another thread, may have closed them meanwhile."""
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
            accepted = self._wait(_CHECK_MS)
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
