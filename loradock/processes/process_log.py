"""The log of a process on stderr, in one format for all processes; it never waits and never raises.

A thread writes the lines. While stderr is not read (a full pipe, a stopped terminal), a bounded
amount is kept, later lines are dropped, and their number is reported with the next line.
"""

import atexit
import json
import os
import select
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final

import msgspec
import structlog

from loradock.messages.engine_options import LogFormat

BYTES_MAX: Final = 8 << 20
"""Bound on the lines that wait to be written."""

LINE_CHARACTERS_MAX: Final = 64 << 10
"""A longer line is cut; in JSON its event is cut, so that the line stays valid."""

_FLUSH_S: Final = 1.0
"""Longest wait at the end of a process for its last lines to be read."""


class LineWriter:
    """Writes lines to a descriptor on a thread; `dropped_line` makes the report of dropped lines.

    `bytes_max` bounds the lines that wait, and the one that is being written.
    """

    def __init__(
        self, fd: int, dropped_line: Callable[[int], str], bytes_max: int = BYTES_MAX
    ) -> None:
        self._fd = fd
        self._dropped_line = dropped_line
        self._bytes_max = bytes_max
        self._bytes = 0
        self.dropped = 0
        # Both are reentrant: a finalizer can log while a line is added.
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, line: str) -> None:
        """Add a line; it is dropped if too many wait."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._changed:
            if self._bytes + len(data) > self._bytes_max:
                self.dropped += 1
                return
            if self.dropped:
                data = self._dropped_line(self.dropped).encode() + b"\n" + data
                self.dropped = 0
            self._bytes += len(data)
            self._lines.put(data)

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until all lines are written; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, timeout_s)

    def _run(self) -> None:
        while True:
            data = self._lines.get()
            self._write(memoryview(data))
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                select.select((), (self._fd,), ())
            except OSError:
                # A closed pipe or a full disk: the line is lost, the process is not.
                return


class _LineLogger:
    """Receiver of rendered lines from structlog; `name` is the logger's."""

    def __init__(self, writer: LineWriter, name: str) -> None:
        self.name = name
        self._writer = writer

    def msg(self, message: str) -> None:
        """Write one line."""
        self._writer.write(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


class _ProcessLog:
    """The writer and the format of this process."""

    writer: LineWriter | None = None
    log_format: LogFormat = "console"

    @classmethod
    def shared_writer(cls) -> LineWriter:
        """Return the one writer of this process."""
        if cls.writer is None:
            cls.writer = LineWriter(2, _dropped_line)
            atexit.register(flush)
        return cls.writer


def configure(log_format: str = "console", name: str = "", log_level: str = "info") -> None:
    """Make all loggers of this process, and its uncaught exceptions, lines on stderr.

    `name` is the name of loggers without one. Tracebacks are plain: structlog's own show the local
    variables of every frame, which can be prompts and can take seconds to print.
    """
    if log_format not in ("console", "json"):
        raise ValueError(f"log format {log_format!r} is not known; known are console and json")
    processors = _json_processors() if log_format == "json" else _console_processors()
    writer = _ProcessLog.shared_writer()
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(log_level),
        logger_factory=lambda *names: _LineLogger(writer, names[0] if names else name),
        cache_logger_on_first_use=False,
    )
    _ProcessLog.log_format = "json" if log_format == "json" else "console"
    sys.excepthook = _log_exception
    threading.excepthook = lambda caught: _log_exception(
        caught.exc_type, caught.exc_value or caught.exc_type(), caught.exc_traceback
    )


def flush(timeout_s: float = _FLUSH_S) -> None:
    """Wait for a bounded time until the lines of this process are written."""
    if _ProcessLog.writer is not None:
        _ProcessLog.writer.flush(timeout_s)


def write_line(line: str) -> None:
    """Write a line that another process has rendered."""
    if _ProcessLog.writer is not None:
        _ProcessLog.writer.write(line)


def _console_processors() -> list[Any]:
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [
        structlog.processors.add_log_level,
        structlog.dev.set_exc_info,
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        renderer,
    ]


def _json_processors() -> list[Any]:
    return [
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.dev.set_exc_info,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _cut,
        _as_json,
    ]


def _as_json(_logger: object, _method: str, line: Any) -> str:
    """Return a line as strict JSON; values that have no form in it become strings."""
    try:
        return msgspec.json.encode(line, enc_hook=str).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return json.dumps({_text(key): _text(value) for key, value in line.items()})


def _text(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text.encode(errors="backslashreplace").decode()


def _cut(_logger: object, _method: str, line: Any) -> Any:
    """Bound the length of each string of a line."""
    return {
        key: value[:LINE_CHARACTERS_MAX] if isinstance(value, str) else value
        for key, value in line.items()
    }


def _dropped_line(count: int) -> str:
    if _ProcessLog.log_format == "console":
        return f"{count} lines of the log were dropped: stderr was not read"
    return (
        '{"event": "lines of the log were dropped: stderr was not read", "level": "warning", '
        f'"count": {count}}}'
    )


def _log_exception(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    structlog.get_logger().critical("uncaught exception", exc_info=(kind, error, traceback))
    flush()
