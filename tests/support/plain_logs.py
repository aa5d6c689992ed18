"""The logs of tests: structlog's defaults, but with plain tracebacks.

A default traceback shows the local variables of every frame, which takes seconds with a model.
"""

import sys
import threading

import structlog

from loradock.processes import process_log


def reset_logs() -> None:
    """Configure structlog as at the start of a test run."""
    process_log.flush()
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(processors=[structlog.processors.add_log_level, renderer])
