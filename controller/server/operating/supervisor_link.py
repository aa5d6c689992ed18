"""What the server shares with its supervisor: pages of steps, and a pipe for what it requests."""

import contextlib
import os
import struct
from typing import Final, NamedTuple

from loradock.processes.progress import Progress

RESTART: Final = struct.Struct("<Q")
"""What a controller writes to its supervisor's pipe: the process id of an engine to restart."""

STOP_ALL: Final = 0
"""In place of a process id: every process has to end, because a client has stopped the server."""


class SupervisorLink(NamedTuple):
    """Pages of the server's and the engine's steps; `restart_fd` is -1 without a supervisor.

    `launch_id`: how the ids of engines begin that this supervisor starts; empty if it starts none.
    """

    progress: Progress
    engine_progress: Progress
    restart_fd: int = -1
    launch_id: str = ""

    def restart(self, pid: int) -> None:
        """Let the supervisor restart an engine, if it is the supervisor's."""
        self._write(pid)

    def stop_all(self) -> None:
        """Let the supervisor end all processes."""
        self._write(STOP_ALL)

    def _write(self, pid: int) -> None:
        if self.restart_fd >= 0:
            # The pipe is full only if the supervisor has not read thousands of these. It is closed
            # once the supervisor has ended, which ends this process too.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self.restart_fd, RESTART.pack(pid))
