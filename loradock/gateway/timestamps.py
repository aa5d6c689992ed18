"""The wall clock, for labels in answers and metrics; nothing waits on it."""

import time
from datetime import datetime


def unix_seconds() -> int:
    """Return the current Unix time in whole seconds."""
    return int(time.time())


def formatted_time(pattern: str) -> str:
    """Return the local time in a format of `strftime`, for chat templates."""
    return datetime.now().astimezone().strftime(pattern)
