"""Logging to stderr that never raises: a full disk or closed pipe loses lines, not the process."""

import contextlib
import sys

import structlog


class StderrLogger(structlog.PrintLogger):
    """Prints lines to stderr; drops a line that can't be written."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def msg(self, message: str) -> None:
        """Print one line."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def configure() -> None:
    """Make all loggers of this process print to stderr.

    Tracebacks are plain: structlog's own show the local variables of every frame, which may be
    prompts and may take seconds to print.
    """
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    processors = [*structlog.get_config()["processors"][:-1], renderer]
    structlog.configure(processors, logger_factory=lambda *_: StderrLogger())
