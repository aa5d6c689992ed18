"""The child processes of `loradock serve`: their starts, restarts, hangs, ends and stderr."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog

from loradock.cli.serve.config import ServeOptions
from loradock.processes import process_log
from loradock.processes.progress import START_BOUND_S, Progress, Step

_TICKS_PER_TIMEOUT: Final = 8
_TICK_MS_MIN: Final = 10
_TICK_MS_MAX: Final = 250


class HangWatch:
    """Judges one process from what is observed of it once per tick.

    It hangs if it is stopped, or if its main loop exceeds a step's bound; a process that is only
    starved of the processor is in neither state. Time counts only while the supervisor ran itself,
    so a suspended machine or a stopped container ends nothing when it resumes.

    A process that is stopped is reported after half of `hang_timeout_ms`; the rest is for delays of
    the supervisor and for the end of the process.
    """

    def __init__(self, hang_timeout_ms: int) -> None:
        tick_ms = min(hang_timeout_ms // _TICKS_PER_TIMEOUT, _TICK_MS_MAX)
        self.tick_ms: Final = max(tick_ms, _TICK_MS_MIN)
        self._stopped_ns_max: Final = max(hang_timeout_ms // 2, self.tick_ms) * 1_000_000
        self.restart(0)

    def restart(self, now_ns: int) -> None:
        """Begin to observe a new process."""
        self._observed_ns = now_ns
        self._number = 0
        self._in_step_ns = 0
        self._stopped_ns = 0
        self._was_stopped = False

    def observe(self, now_ns: int, step: Step | None, *, is_stopped: bool) -> str:
        """Return why the process hangs; empty if it does not.

        `step`: None if none can be read.
        """
        # A longer time means that the supervisor did not run, so it can't judge others.
        elapsed_ns = min(now_ns - self._observed_ns, 2 * self.tick_ms * 1_000_000)
        self._observed_ns = now_ns
        self._stopped_ns = self._stopped_ns + elapsed_ns if self._was_stopped and is_stopped else 0
        self._was_stopped = is_stopped
        if self._stopped_ns >= self._stopped_ns_max:
            return "it is stopped"
        number = step.number if step else self._number
        self._in_step_ns = self._in_step_ns + elapsed_ns if number == self._number else 0
        self._number = number
        bound_ns = step.bound_ns if step else START_BOUND_S * 1_000_000_000
        if self._in_step_ns <= bound_ns:
            return ""
        return f"step {step.name if step else 'start'} exceeds {bound_ns / 1e9:g} s"


def process_tree(pid: int) -> list[int]:
    """Return a process and those that its main thread started, directly or indirectly."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            found += map(int, children.split())
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False for a process that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The state follows the name of the program, which is in parentheses and can contain some.
    return stat.rpartition(b")")[2].split()[0] == b"T"


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

_LINE_BYTES_MAX: Final = 4 * process_log.LINE_CHARACTERS_MAX
_READ_BYTES: Final = 64 << 10

log = structlog.get_logger("serve")


class ChildOutput:
    """The stderr of a child in JSON: a line that is not JSON becomes the event of such a line.

    Libraries write to stderr by themselves, and a process that a signal kills can't wrap its last
    words itself. It is a pipe, and a thread that forwards its lines.
    """

    def __init__(self, child: str) -> None:
        self._child = child
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"stderr of {child}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close this process's end for writing: the thread ends after the last child's."""
        os.close(self.write_fd)

    def join(self, timeout_s: float) -> None:
        """Wait for the last lines of a child that has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        rest = b""
        while data := os.read(self._read_fd, _READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._forward(line)
            if len(rest) > _LINE_BYTES_MAX:
                self._forward(rest)
                rest = b""
        if rest:
            self._forward(rest)
        os.close(self._read_fd)

    def _forward(self, line: bytes) -> None:
        text = line.decode(errors="backslashreplace")
        if is_json(line):
            process_log.write_line(text)
        elif text.strip():
            log.warning(text, child=self._child)


def is_json(line: bytes) -> bool:
    """Return whether a line is one JSON object."""
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


class Child:
    """A child process that is kept running: its starts, its exit statuses, its restart delay.

    `progress`: the page on which it reports its steps. `fds`: descriptors that it inherits.
    `has_helpers`: the processes that it starts are not needed to serve, and watched by it alone.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        progress: Progress | None = None,
        options: ServeOptions = ServeOptions(),  # noqa: B008 - immutable
        fds: tuple[int, ...] = (),
        *,
        has_helpers: bool = False,
    ) -> None:
        self.name = name
        self._has_helpers = has_helpers
        self._fds = fds
        self._log_format = options.log_format
        self._output: ChildOutput | None = None
        self._command = command
        self._progress = progress or Progress()
        self._watch = HangWatch(options.hang_timeout_ms)
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
        """True if it can be started again."""
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
        # In a separate session: only the parent receives a terminal's Ctrl-C.
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
            # The ranks of an engine too: a rank that hangs does not notice its parent's end.
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
