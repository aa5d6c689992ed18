"""A watch on the end of the attached engine's process, which wakes the server's loop."""

import contextlib
import os
from collections.abc import Callable

Watch = Callable[[int], None]


class EngineWatch:
    """The descriptor of one process, among those that the loop polls."""

    def __init__(self, watch: Watch, unwatch: Watch) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._fd = -1

    def has_ended(self, ready: set[int]) -> bool:
        """Whether the watched process is among the ready descriptors."""
        return self._fd in ready

    def start(self, pid: int) -> None:
        """Watch a process, unless one is watched already."""
        if self._fd >= 0:
            return
        # A process that has ended has no descriptor; the heartbeat timeout finds its loss.
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(pid)
            self._watch(self._fd)

    def stop(self) -> None:
        """Watch nothing."""
        if self._fd >= 0:
            self._unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
