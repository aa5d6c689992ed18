"""The watch on the attached engine, and the requests to the supervisor of `loradock serve`.

An engine is lost when its process ends or its heartbeats stop. One of this machine is then
restarted by the supervisor that started it.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import structlog

from loradock.controller.core.world import World
from loradock.controller.server.engine_link import EngineLink
from loradock.messages.records import EngineLost
from loradock.processes.progress import Progress, loading_text

RESTART: Final = struct.Struct("<Q")
"""Line on the pipe to the supervisor: the process id of an engine to restart."""

STOP_ALL: Final = 0
"""In place of a process id: every process has to end, because a client has stopped the server."""


log = structlog.get_logger("controller")


class SupervisorLink(NamedTuple):
    """Pages of the server's and the engine's steps; `restart_fd` is -1 without a supervisor.

    `launch_id`: how the ids of engines begin that this supervisor starts; empty if it starts none.
    """

    progress: Progress
    engine_progress: Progress
    restart_fd: int = -1
    launch_id: str = ""

    def restart(self, pid: int) -> None:
        """Have the supervisor restart an engine, if it is the supervisor's."""
        self._write(pid)

    def stop_all(self) -> None:
        """Have the supervisor end all processes."""
        self._write(STOP_ALL)

    def _write(self, pid: int) -> None:
        if self.restart_fd >= 0:
            # The pipe is full only if the supervisor has not read thousands of these. It is closed
            # once the supervisor has ended, which ends this process too.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self.restart_fd, RESTART.pack(pid))


class EngineSupervision:
    """Finds the loss of the engine of a link, and has a process of this machine restarted.

    `watch` and `unwatch` add and remove a descriptor that the loop polls: the end of the engine's
    process wakes it. `is_local`: whether a connection is of this machine, where process ids mean
    the same.
    """

    def __init__(
        self,
        link: EngineLink,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        is_local: Callable[[bytes], bool],
        supervisor: SupervisorLink,
        world: World,
    ) -> None:
        self._link = link
        self._watch = watch
        self._unwatch = unwatch
        self._is_local = is_local
        self._supervisor = supervisor
        self._world = world
        # The descriptor of the watched process.
        self._fd = -1

    def loss_before(self) -> EngineLost | None:
        """Return an engine of an earlier supervisor, with which it has ended.

        Otherwise the log's engine would be shown, and waited for, until its silence is noticed.
        """
        engine, launch_id = self._world.engine, self._supervisor.launch_id
        if engine is None or engine.engine_id.startswith(launch_id):
            return None
        return EngineLost(engine.engine_id, "its server ended")

    def loss(self, now: int, ready: set[int]) -> EngineLost | None:
        """Detach and return an engine whose process ended, or that is silent for too long."""
        ended = self._fd in ready
        # A step that the engine reports only shortens the silence.
        if not ended and not (
            self._link.is_overdue(now) and self._link.is_overdue(now, self._step_since())
        ):
            return None
        reason = "its process ended" if ended else "its heartbeats stopped"
        lost = EngineLost(self._link.engine_id, reason)
        log.warning("engine lost", engine=lost.engine_id, reason=reason)
        self._link.detach(now, ended=ended)
        # Now, not once this is logged: an ended process stays ready, and the log can stay full.
        self._stop_watching()
        return lost

    def _step_since(self) -> int | None:
        """Return the start of the step that the engine reports; None if it has no supervisor."""
        step, engine = self._supervisor.engine_progress.read(), self._world.engine
        return step.since_ns if step and engine and step.pid == engine.pid else None

    def loading_text(self) -> str:
        """Return how far the supervisor's engine has read its model; empty if not known."""
        return loading_text(self._supervisor.engine_progress.read())

    def restart(self, engine_id: str, pid: int, reason: str) -> None:
        """Detach an engine, and have its supervisor (if it is ours) restart it."""
        log.error("engine has to be restarted", engine=engine_id, pid=pid, reason=reason)
        self._link.detach(time.monotonic_ns(), ended=True)
        self._stop_watching()
        self._supervisor.restart(pid)

    def watch(self) -> None:
        """Watch the process of the attached engine, if it is one of this machine."""
        engine = self._world.engine
        if engine is None or not self._link.engine_id:
            self._stop_watching()
        elif self._fd < 0 and self._is_local(self._link.peer):
            # A process that has ended has no descriptor; the heartbeat timeout finds its loss.
            with contextlib.suppress(OSError):
                self._fd = os.pidfd_open(engine.pid)
                self._watch(self._fd)

    def _stop_watching(self) -> None:
        if self._fd >= 0:
            self._unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
