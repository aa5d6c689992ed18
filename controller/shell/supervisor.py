"""`loradock serve`: a controller and its engine as child processes, each started again if it dies.

What it is: a parent that waits. What it is not: in the way of any message; it has no socket. One
rule: children outlive each other but not the parent, whose death they see by themselves.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog
from msgspec import Struct

from controller.shell.engine_options import EngineOptions
from controller.shell.server import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_LOG,
    EXIT_SOCKET,
    ServerConfig,
)
from controller.shell.transport import TransportError, endpoint

_FINAL: Final = frozenset({EXIT_CONFIG, EXIT_LOG, EXIT_SOCKET})
_FROM_OUTSIDE: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT})
"""Exit statuses that are no fault of the child's own."""

_FAILURES_MAX: Final = 3
"""So often in a row may a child fail without having run for `_HEALTHY_S`."""

_BACKOFF_S_MIN: Final = 0.1
_BACKOFF_S_MAX: Final = 5.0
_HEALTHY_S: Final = 30.0
_STOP_S: Final = 10.0

log = structlog.get_logger("serve")


class ServeConfig(Struct, frozen=True):
    """What `loradock serve` was asked for; `engine` external waits for one started elsewhere."""

    server: ServerConfig
    model: str = ""
    adapter_roots: tuple[str, ...] = ()
    engine: Literal["managed", "external"] = "managed"
    engine_options: EngineOptions = EngineOptions()
    tensor_parallel_size: int = 1


class Child:
    """One process that should run."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff_s = _BACKOFF_S_MIN
        self._started_s = 0.0
        self._failures = 0
        self.start_at_s = 0.0
        self.fd = -1

    @property
    def can_run(self) -> bool:
        """Whether it is worth another start."""
        return self._failures < _FAILURES_MAX

    def start(self, parent_fd: int) -> None:
        """Start it; its end will show on `fd`."""
        # In a session of its own: a terminal's Ctrl-C is the parent's to pass on.
        self._process = subprocess.Popen(  # noqa: S603 - our own modules, no shell
            self._command, pass_fds=(parent_fd,), start_new_session=True
        )
        self._started_s = time.monotonic()
        self.fd = os.pidfd_open(self._process.pid)
        log.info("child started", child=self.name, pid=self._process.pid)

    def reap(self) -> int:
        """Take the ended process's exit status, and set when to start the next."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        status = self._process.wait()
        os.close(self.fd)
        self._process, self.fd = None, -1
        now = time.monotonic()
        if now - self._started_s > _HEALTHY_S:
            self._backoff_s, self._failures = _BACKOFF_S_MIN, 0
        self._failures += status not in _FROM_OUTSIDE
        self.start_at_s = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)
        return status

    def stop(self) -> None:
        """Ask it to end, and make it end where it does not."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("child did not end and is killed", child=self.name)
            self._process.kill()
            self._process.wait()
        os.close(self.fd)
        self._process, self.fd = None, -1


class Supervisor:
    """Keeps its children running until it is told to stop or one can't run at all."""

    def __init__(self, children: Sequence[Child], parent_fd: int) -> None:
        self._children = children
        self._parent_fd = parent_fd
        self._signals, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        """Returns 0 after a signal, else the exit status for a child that can't run."""
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            ended = self._loop()
        finally:
            for child in reversed(self._children):
                child.stop()
        if ended is None:
            return 0
        name, status = ended
        log.error("a child can't run; it said why above", child=name, status=status)
        return status if status in _FINAL else EXIT_FAILED

    def _loop(self) -> tuple[str, int] | None:
        """Returns the child that can't run, with its last exit status; None after a signal."""
        while True:
            self._start_due()
            poller = select.poll()
            poller.register(self._signals, select.POLLIN)
            running = {child.fd: child for child in self._children if child.fd >= 0}
            for fd in running:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(self._timeout_ms()):
                if fd == self._signals:
                    log.info("stopping")
                    return None
                child = running[fd]
                status = child.reap()
                log.warning("child ended", child=child.name, status=status)
                if status in _FINAL or not child.can_run:
                    return child.name, status

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.fd < 0 and child.start_at_s <= now:
                child.start(self._parent_fd)

    def _timeout_ms(self) -> int | None:
        due = [child.start_at_s for child in self._children if child.fd < 0]
        if not due:
            return None
        return max(0, int((min(due) - time.monotonic()) * 1000) + 1)


def serve(config: ServeConfig) -> int:
    """Run controller and engine until a signal; returns the process's exit status."""
    if config.engine == "managed" and not (Path(config.model) / "config.json").is_file():
        # The engine would say the same, after it has loaded all that a model needs.
        log.error("no model is there: it has no config.json", directory=config.model)
        return EXIT_CONFIG
    # The read end is never written to: its end of file is the parent's death.
    parent_fd, keep = os.pipe()
    try:
        children = [Child("controller", _controller_command(config.server, parent_fd))]
        if config.engine == "managed":
            children.append(Child("engine", _engine_command(config)))
        return Supervisor(children, parent_fd).run()
    except TransportError as error:
        log.error("can't serve here", error=str(error))
        return EXIT_SOCKET
    finally:
        os.close(keep)
        os.close(parent_fd)


def _controller_command(config: ServerConfig, parent_fd: int) -> list[str]:
    options = msgspec.json.encode(config).decode()
    return [sys.executable, "-m", "controller.shell.server", options, str(parent_fd)]


def _engine_command(config: ServeConfig) -> list[str]:
    directory, limits = Path(config.server.directory), config.server.limits
    command = [sys.executable, "-m"]
    if config.tensor_parallel_size > 1:
        command += ["engine.worker.torchrun", "--standalone"]
        command += ["--nproc-per-node", str(config.tensor_parallel_size), "-m"]
    command += ["engine.worker"]
    command += ["--connect", endpoint(directory, "engine.sock"), "--model", config.model]
    for root in config.adapter_roots:
        command += ["--adapter-root", root]
    command += ["--max-loras", str(limits.slots_max)]
    command += ["--device-bytes-max", str(limits.device_bytes_max)]
    # A pid and not the pipe, which does not reach the ranks through torchrun.
    command += ["--parent-pid", str(os.getpid())]
    return [*command, *config.engine_options.command_line()]
