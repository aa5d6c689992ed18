"""What a process of ours says to people: structlog's lines, on stderr.

What it is: a logger that goes on when nobody can be told. What it is not: the log. One rule: a full
disk or a closed pipe behind stderr costs lines, never the process.
"""

import contextlib
import sys

import structlog


class Lines(structlog.PrintLogger):
    """Prints each line to stderr, or loses it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def msg(self, message: str) -> None:
        """Print one line."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def configure() -> None:
    """Let all of this process's loggers print so."""
    structlog.configure(logger_factory=lambda *_: Lines())
