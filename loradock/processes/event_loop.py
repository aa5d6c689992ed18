"""The event loop of processes that answer many small requests."""

import asyncio
from collections.abc import Callable
from typing import Any


def loop_runner() -> Callable[[Any], None]:
    """Return the function that runs a coroutine: uvloop's if it is installed, else asyncio's."""
    try:
        import uvloop  # noqa: PLC0415 - does not install everywhere
    except ImportError:
        return asyncio.run
    return uvloop.run
