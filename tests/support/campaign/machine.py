"""One machine's clocks, process ids and descriptors, in place of the operating system's.

`simulated_machine` replaces `time`, `os`, `gc`, threads and loggers in the modules that the
campaign runs. The modules keep their references, so one replacement serves all schedules; each
schedule begins with `Machine.reset`.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from loradock.controller.core.controller import Controller
from loradock.controller.server.inputs import Clocks
from loradock.messages.requests import LoadAdapter

MS: Final = 1_000_000
SECOND: Final = 1_000_000_000
CONTROLLER_PID: Final = 2
RESTART_FD: Final = 99_999
"""Where the controller writes which engine its supervisor has to restart."""

_START_NS: Final = 1_000 * SECOND
_WALL_START_NS: Final = 1_700_000_000 * SECOND
_PROGRAM: Final = (
    "loradock.controller.server.",
    "loradock.controller.log.",
    "loradock.engine.worker.",
)
"""Modules with these names are run with the simulated machine."""


class Machine:
    """Time that only the scheduler advances, and the processes and descriptors of a schedule."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.now_ns = _START_NS
        self.wall_offset_ns = _WALL_START_NS - _START_NS
        self.running_pids: set[int] = set()
        self.hides_processes = False
        """Whether processes have no descriptors, as those of another machine."""
        self.on_restart: Callable[[], None] = lambda: None
        self._next_fd = 100_000
        self._counters: dict[int, int] = {}
        self._process_fds: dict[int, int] = {}

    @property
    def now_s(self) -> float:
        """The monotonic clock's time in seconds."""
        return self.now_ns / SECOND

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.time_ns, self.monotonic_ns)

    # Clocks, as `time` has them.

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return self.now_ns + self.wall_offset_ns

    def time(self) -> float:
        return self.time_ns() / SECOND

    def sleep(self, _seconds: float) -> None:
        raise AssertionError("a main loop sleeps")

    # Processes and descriptors, as `os` has them.

    def getpid(self) -> int:
        return CONTROLLER_PID

    def pidfd_open(self, pid: int) -> int:
        if self.hides_processes or pid not in self.running_pids:
            raise ProcessLookupError(pid)
        self._next_fd += 1
        self._process_fds[self._next_fd] = pid
        return self._next_fd

    def eventfd(self, count: int, _flags: int = 0) -> int:
        self._next_fd += 1
        self._counters[self._next_fd] = count
        return self._next_fd

    def eventfd_write(self, fd: int, count: int) -> None:
        self._counters[fd] += count

    def eventfd_read(self, fd: int) -> int:
        count, self._counters[fd] = self._counters[fd], 0
        return count

    def close(self, fd: int) -> None:
        self._counters.pop(fd, None)
        self._process_fds.pop(fd, None)

    def write(self, fd: int, data: bytes) -> int:
        assert fd == RESTART_FD
        self.on_restart()
        return len(data)

    def is_ready(self, fd: int) -> bool:
        """Whether a poll would report the descriptor."""
        if fd in self._process_fds:
            return self._process_fds[fd] not in self.running_pids
        return self._counters.get(fd, 0) > 0


MACHINE: Final = Machine()


class _Module:
    """A module of the standard library of which `replacements` are the machine's."""

    def __init__(self, original: Any, *names: str) -> None:
        self._original = original
        for name in names:
            setattr(self, name, getattr(MACHINE, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _NoCollection:
    """`gc` without effect: a collection at each simulated start takes most of the time."""

    def collect(self) -> int:
        return 0

    def freeze(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)


class ImmediateExecutor:
    """A pool of threads whose jobs are complete when they are submitted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._is_closed = False

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        self._is_closed = True


class Poison(Exception):  # noqa: N818 - the input, not the error
    """The planned failure of a handler."""


POISON_PATH: Final = "poison"
"""An adapter's path with which every request for it fails when it is handled."""


def _poisonous(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Controller.handle` that fails after its changes for `POISON_PATH`."""

    def poisoned(self: Controller, message: Any, *arguments: Any) -> Any:
        actions = handle(self, message, *arguments)
        if type(message) is LoadAdapter and message.path == POISON_PATH:
            raise Poison(message)
        return actions

    return poisoned


class SilentLogger:
    """A logger that counts messages by their text."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def _count(self, event: str, **_: Any) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1

    debug = info = warning = error = critical = _count

    def exception(self, event: str, **_: Any) -> None:
        """Let a failure of the program end the schedule, unless it was planned."""
        error = sys.exception()
        if error is not None and not isinstance(error.__cause__ or error, Poison):
            raise AssertionError(event) from error
        self._count(event)


LOGGER: Final = SilentLogger()

_TIME: Final = _Module(time, "monotonic_ns", "monotonic", "time_ns", "time", "sleep")
_OS: Final = _Module(
    os, "getpid", "pidfd_open", "eventfd", "eventfd_write", "eventfd_read", "close", "write"
)


@contextmanager
def simulated_machine() -> Iterator[Machine]:
    """Replace the operating system in all imported modules of the program while it lasts."""
    replacements: list[tuple[Any, str, Any]] = [
        (time, "time", _TIME),
        (os, "os", _OS),
        (gc, "gc", _NoCollection()),
        (ThreadPoolExecutor, "ThreadPoolExecutor", ImmediateExecutor),
    ]
    with_files = ("loradock.controller.log.storage", "loradock.controller.log.repair")
    modules = [
        module
        # A copy: another thread may import meanwhile.
        for name, module in sorted(sys.modules.copy().items())
        if name.startswith(_PROGRAM) and name not in with_files
    ]
    was_enabled = gc.isenabled()
    patches = [
        mock.patch.object(module, name, replacement)
        for module in modules
        for original, name, replacement in replacements
        if getattr(module, name, None) is original
    ]
    patches += [
        mock.patch.object(module, name, LOGGER)
        for module in modules
        for name in ("log", "_log")
        if hasattr(getattr(module, name, None), "warning")
    ]
    patches.append(mock.patch.object(Controller, "handle", _poisonous(Controller.handle)))
    for patch in patches:
        patch.start()
    # Reference counting frees nearly everything; collections would take a fifth of the time.
    gc.disable()
    try:
        yield MACHINE
    finally:
        if was_enabled:
            gc.enable()
        for patch in reversed(patches):
            patch.stop()
