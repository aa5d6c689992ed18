"""Logs of the gateway to stderr; a line that can't be written is dropped."""

import contextlib
import sys
from typing import Any

import structlog


class _Stderr:
    """The file of the logs."""

    def write(self, text: str) -> None:
        """Write as far as possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush as far as possible."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def configure_logs() -> None:
    """Make all loggers of this process print to stderr, with plain tracebacks."""
    file: Any = _Stderr()
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    processors = [*structlog.get_config()["processors"][:-1], renderer]
    structlog.configure(processors, logger_factory=structlog.PrintLoggerFactory(file))
