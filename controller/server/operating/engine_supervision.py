"""What the server does about an engine that ends, is silent or has to be restarted."""

import time
from typing import Protocol

import structlog

from loradock.controller.core.world import World
from loradock.controller.server.operating.engine_watch import EngineWatch
from loradock.controller.server.operating.supervisor_link import SupervisorLink
from loradock.messages.records import EngineLost

log = structlog.get_logger("controller")


class Link(Protocol):
    """What supervision uses of the link to an engine."""

    engine_id: str

    def is_overdue(self, now_ns: int, step_since_ns: int | None) -> bool:
        """Whether the engine is silent for too long."""

    def detach(self, now_ns: int, *, ended: bool) -> None:
        """Close the link to the engine, whose process has `ended` or may continue."""


class EngineSupervision:
    """Finds the loss of the engine of a link, and has a process of this machine restarted."""

    def __init__(
        self, link: Link, watch: EngineWatch, supervisor: SupervisorLink, world: World
    ) -> None:
        self._link = link
        self._watch = watch
        self._supervisor = supervisor
        self._world = world

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
        ended = self._watch.has_ended(ready)
        if not ended and not self._link.is_overdue(now, self._step_since()):
            return None
        reason = "its process ended" if ended else "its heartbeats stopped"
        lost = EngineLost(self._link.engine_id, reason)
        log.warning("engine lost", engine=lost.engine_id, reason=reason)
        self._link.detach(now, ended=ended)
        # Now, not once this is logged: an ended process stays ready, and the log may stay full.
        self._watch.stop()
        return lost

    def _step_since(self) -> int | None:
        """Return the start of the step that the engine reports; None if it has no supervisor."""
        step, engine = self._supervisor.engine_progress.read(), self._world.engine
        return step.since_ns if step and engine and step.pid == engine.pid else None

    def restart(self, engine_id: str, pid: int, reason: str) -> None:
        """Detach an engine, and have its supervisor (if it is ours) restart it."""
        log.error("engine has to be restarted", engine=engine_id, pid=pid, reason=reason)
        self._link.detach(time.monotonic_ns(), ended=True)
        self._watch.stop()
        self._supervisor.restart(pid)

    def watch(self, *, is_local: bool) -> None:
        """Watch the process of the attached engine, if it is one of this machine."""
        engine = self._world.engine
        if engine is None or not self._link.engine_id:
            self._watch.stop()
        elif is_local:
            self._watch.start(engine.pid)
