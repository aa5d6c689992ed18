"""`loradock serve`: the controller and its engine as child processes, restarted after end or hang.

The supervisor opens no socket: no message passes through it. A child survives the other child's end
but not the supervisor's, which it detects by itself. Each child reports the steps of its main loop
on a shared page, from which the supervisor finds that it hangs.
"""

import contextlib
import errno
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from loradock.controller.server.child_output import ChildOutput
from loradock.controller.server.config import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_LOG,
    EXIT_SOCKET,
    ServeConfig,
    Supervision,
)
from loradock.controller.server.hang_watch import (
    HANG_TIMEOUT_MS,
    HangWatch,
    is_stopped,
    process_tree,
)
from loradock.controller.server.keys import DirectoryRefused, KeyStore, new_pair
from loradock.controller.server.listener import TransportError, endpoint
from loradock.controller.server.supervision import RESTART, STOP_ALL
from loradock.messages.engine_options import EngineArguments, LogFormat
from loradock.processes.key_files import KeyFileError, share_key_pair
from loradock.processes.option_list import command_line
from loradock.processes.progress import Progress
from loradock.processes.subprocesses import process_command

_FINAL: Final = frozenset({EXIT_CONFIG, EXIT_LOG, EXIT_SOCKET})
"""Exit statuses after which a restart does not help."""

_ENDED_ON_REQUEST: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT})
"""Exit statuses that are not a failure of the child."""

_NO_ROOM: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of a start that pass: too many processes or descriptors, too little memory."""

_FAILURES_MAX: Final = 3
"""Failures in a row, none of them after `_HEALTHY_S`, after which a child is not restarted."""

_BACKOFF_S_MIN: Final = 0.1
_BACKOFF_S_MAX: Final = 5.0
_HEALTHY_S: Final = 30.0
_STOP_S: Final = 10.0
_LAST_LINES_S: Final = 1.0

log = structlog.get_logger("serve")


class Child:
    """A child process that is kept running: its starts, its exit statuses, its restart delay.

    `progress`: the page on which it reports its steps. `fds`: descriptors that it inherits.
    `has_helpers`: the processes that it starts are not needed to serve, and watched by it alone.
    """

    def __init__(  # noqa: PLR0913 - one per way in which children differ
        self,
        name: str,
        command: Sequence[str],
        progress: Progress | None = None,
        hang_timeout_ms: int = HANG_TIMEOUT_MS,
        log_format: LogFormat = "console",
        fds: tuple[int, ...] = (),
        *,
        has_helpers: bool = False,
    ) -> None:
        self.name = name
        self._has_helpers = has_helpers
        self._fds = fds
        self._log_format = log_format
        self._output: ChildOutput | None = None
        self._command = command
        self._progress = progress or Progress()
        self._watch = HangWatch(hang_timeout_ms)
        self.tick_ms: Final = self._watch.tick_ms
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff_s = _BACKOFF_S_MIN
        self._started_s = 0.0
        self._failures = 0
        self.start_at_s = 0.0
        self.fd = -1

    @property
    def reason(self) -> str:
        """Why the process has ended, as far as it recorded that."""
        return self._progress.reason()

    @property
    def can_run(self) -> bool:
        """Whether it may be started again."""
        return self._failures < _FAILURES_MAX

    def start(self, parent_fd: int) -> None:
        """Start the process, or set the time of the next attempt if the system has no room for it.

        `fd` becomes readable when the process ends.
        """
        self._progress.clear()
        self._watch.restart(time.monotonic_ns())
        try:
            self._launch(parent_fd)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.error("child can't be started now", child=self.name, error=str(error))
            self._delay_start()

    def _launch(self, parent_fd: int) -> None:
        self._output = ChildOutput(self.name) if self._log_format == "json" else None
        try:
            process = self._open_process(parent_fd)
        finally:
            if self._output:
                self._output.close()
        self._started_s = time.monotonic()
        log.info("child started", child=self.name, pid=process.pid)

    def _open_process(self, parent_fd: int) -> "subprocess.Popen[bytes]":
        # In a session of its own: only the parent receives a terminal's Ctrl-C.
        process = subprocess.Popen(  # noqa: S603 - our own modules, no shell
            self._command,
            pass_fds=(parent_fd, *self._fds),
            start_new_session=True,
            stderr=self._output.write_fd if self._output else None,
        )
        try:
            self.fd = os.pidfd_open(process.pid)
        except OSError:
            # Without a descriptor its end would not be noticed.
            process.kill()
            process.wait()
            raise
        self._process = process
        return process

    def reap(self) -> int:
        """Return the ended process's exit status, and set the time of the next start."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        status = self._process.wait()
        self._forget_process()
        now = time.monotonic()
        if now - self._started_s > _HEALTHY_S:
            self._backoff_s, self._failures = _BACKOFF_S_MIN, 0
        self._failures += status not in _ENDED_ON_REQUEST
        self._delay_start()
        return status

    def _delay_start(self) -> None:
        self.start_at_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)

    def kill_if_hung(self) -> None:
        """Kill the process, and those that it started, if it hangs; call this once per tick."""
        if self._process is None:
            return
        pids = process_tree(self._process.pid)
        # An engine needs all its ranks.
        stopped = any(map(is_stopped, pids[:1] if self._has_helpers else pids))
        reason = self._watch.observe(time.monotonic_ns(), self._progress.read(), is_stopped=stopped)
        if reason:
            log.error("child hangs and is killed", child=self.name, reason=reason)
            _kill(pids)

    def kill_if_of(self, pid: int) -> None:
        """Kill the process, and those that it started, if `pid` is one of them."""
        pids = [] if self._process is None else process_tree(self._process.pid)
        if pid in pids:
            log.error("child is killed at the controller's request", child=self.name, pid=pid)
            _kill(pids)

    def stop(self) -> None:
        """End the process with SIGTERM, after `_STOP_S` with SIGKILL."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("child did not end and is killed", child=self.name)
            # The ranks of an engine too: one that hangs does not notice its parent's end.
            _kill(process_tree(self._process.pid))
            self._process.wait()
        self._forget_process()

    def _forget_process(self) -> None:
        os.close(self.fd)
        self._process, self.fd = None, -1
        if self._output:
            # Its last words come before the line about its end.
            self._output.join(_LAST_LINES_S)
            self._output = None


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Supervisor:
    """Keeps its children running until a signal comes or one of them can't run."""

    def __init__(
        self,
        children: Sequence[Child],
        parent_fd: int,
        restarts_fd: int = -1,
        restartable: Child | None = None,
    ) -> None:
        """`restarts_fd`: where process ids of `restartable` are read that have to be restarted."""
        self._children = children
        self._parent_fd = parent_fd
        self._restarts_fd = restarts_fd
        self._restartable = restartable
        self._signals, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.reason = ""
        """Why a child can't run; empty while all can."""

    def run(self) -> int:
        """Run until a signal (returns 0) or until a child can't run (returns an exit status)."""
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            ended = self._loop()
        finally:
            for child in self._stop_order():
                child.stop()
        if ended is None:
            return 0
        name, status, why = ended
        self.reason = f"{name}: {why or 'see its messages above'}"
        log.error("a child can't run", child=name, status=status, reason=self.reason)
        return status if status in _FINAL else EXIT_FAILED

    def _stop_order(self) -> list[Child]:
        """Return the children in the order in which they end.

        The controller ends before the engine, whose end would be a loss to it otherwise, and after
        the gateway, whose requests it answers.
        """
        first = [child for child in self._children if child.name == "gateway"]
        return [*first, *(child for child in self._children if child not in first)]

    def _loop(self) -> tuple[str, int, str] | None:
        """Return the child that can't run, its last exit status and why; None after a signal."""
        while True:
            self._start_due()
            poller = select.poll()
            poller.register(self._signals, select.POLLIN)
            if self._restarts_fd >= 0:
                poller.register(self._restarts_fd, select.POLLIN)
            running = {child.fd: child for child in self._children if child.fd >= 0}
            for fd in running:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(self._timeout_ms()):
                if fd == self._signals:
                    log.info("stopping")
                    return None
                if fd == self._restarts_fd:
                    if self._restart():
                        log.info("stopping: a client has stopped the server")
                        return None
                    continue
                child = running[fd]
                status = child.reap()
                log.warning("child ended", child=child.name, status=status)
                if status in _FINAL or not child.can_run:
                    return child.name, status, child.reason
            for child in self._children:
                child.kill_if_hung()

    def _restart(self) -> bool:
        """Kill the child that the controller reports; it is started again as after any end.

        Returns whether every child has to end instead.
        """
        (pid,) = RESTART.unpack(os.read(self._restarts_fd, RESTART.size))
        if pid == STOP_ALL:
            return True
        if self._restartable is not None:
            self._restartable.kill_if_of(pid)
        return False

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.fd < 0 and child.start_at_s <= now:
                child.start(self._parent_fd)

    def _timeout_ms(self) -> int:
        """Return the time until the next tick or the next start."""
        now = time.monotonic()
        due = [child.start_at_s - now for child in self._children if child.fd < 0]
        left_ms = [max(0, int(left_s * 1000) + 1) for left_s in due]
        return min([*left_ms, *(child.tick_ms for child in self._children)])


class Ended(NamedTuple):
    """The end of a server: the exit status, and the reason unless it was ended on request."""

    status: int
    reason: str = ""


def serve(config: ServeConfig) -> Ended:
    """Run controller and engine until a signal; return how they ended."""
    # Nothing is ever written: children see the end of file when this process ends.
    parent_fd, write_fd = os.pipe()
    # Both ends stay open here, so that no end of a child closes the pipe.
    restarts_fd, restart_fd = os.pipe2(os.O_NONBLOCK)
    try:
        children = _children(config, parent_fd, restart_fd)
        engine = next((child for child in children if child.name == "engine"), None)
        supervisor = Supervisor(children, parent_fd, restarts_fd, engine)
        return Ended(supervisor.run(), supervisor.reason)
    except (TransportError, DirectoryRefused, KeyFileError) as error:
        log.error("can't serve here", error=str(error))
        return Ended(EXIT_SOCKET, str(error))
    finally:
        for fd in (write_fd, parent_fd, restarts_fd, restart_fd):
            os.close(fd)


def _children(config: ServeConfig, parent_fd: int, restart_fd: int) -> list[Child]:
    own, of_engine = Progress.share(), Progress.share()
    managed = config.engine == "managed"
    # An engine that is started elsewhere reports to its own supervisor, if it has one.
    key = new_pair() if managed else None
    supervision = Supervision(
        parent_fd,
        restart_fd,
        own.path,
        of_engine.path if managed else "",
        key.public if key else "",
        secrets.token_hex(4) if managed else "",
        config.log_format,
        config.log_level,
    )
    common, fds = (config.hang_timeout_ms, config.log_format), (restart_fd,)
    options = [msgspec.json.encode(one).decode() for one in (config.server, supervision)]
    command = [*process_command("controller"), *options]
    # It starts snapshotters, and ends one that hangs.
    children = [Child("controller", command, own, *common, fds, has_helpers=True)]
    if key:
        command = _engine_command(config, supervision, share_key_pair(key))
        children.append(Child("engine", command, of_engine, *common))
    if config.gateway:
        page = Progress.share()
        command = [sys.executable, *config.gateway, str(parent_fd), page.path]
        children.append(Child("gateway", command, page, *common))
    return children


def _engine_command(config: ServeConfig, supervision: Supervision, key: str) -> list[str]:
    directory, limits = Path(config.server.directory), config.server.limits
    store = KeyStore(directory)
    store.server_pair()
    command = process_command("engine")
    if config.tensor_parallel_size > 1:
        ranks = ("--standalone", "--nproc-per-node", str(config.tensor_parallel_size))
        # The ranks are started by the same kind of command, not by torchrun's own `python -m`.
        command = [*process_command("ranks"), *ranks, "--no-python", *command]
    arguments = EngineArguments(
        **msgspec.structs.asdict(config.engine_options),
        connect=endpoint(directory, "engine.sock"),
        model=config.model,
        adapter_roots=config.adapter_roots,
        max_loras=limits.slots_max,
        device_bytes_max=limits.device_bytes_max,
        # A pid and not the pipe, which torchrun does not pass on to the ranks.
        parent_pid=os.getpid(),
        progress=supervision.engine_progress,
        launch_id=supervision.launch_id,
        key=key,
        server_key=str(store.server_public_path),
        log_format=config.log_format,
        log_level=config.log_level,
        step_timeout_ms=config.step_timeout_ms,
    )
    return [*command, *command_line(arguments)]
