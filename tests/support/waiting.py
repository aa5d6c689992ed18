"""Waits of tests, which end by what happens; only a run that hangs ends by the clock."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

Found = TypeVar("Found")

HANG_S: Final = 300.0
"""Seconds without progress after which a test fails instead of waiting on; no result needs them."""

PAUSE_S: Final = 0.01
"""Seconds between two looks."""


def wait_until(
    condition: Callable[[], Found],
    progress: Callable[[], object] = lambda: None,
    what: str = "",
    pause_s: float = PAUSE_S,
) -> Found:
    """Return the first true result of `condition`.

    Fails after `HANG_S` in which the value of `progress` did not change.
    """
    seen, deadline = progress(), time.monotonic() + HANG_S
    while not (found := condition()):
        now, latest = time.monotonic(), progress()
        if latest != seen:
            seen, deadline = latest, now + HANG_S
        assert now < deadline, f"no progress for {HANG_S:.0f} s: {what or condition}; {seen}"
        time.sleep(pause_s)
    return found
