"""Ranks in lockstep: rank 0 leads, and the other ranks follow it step by step.

A step is the commands since the last one, one forward pass, and the collection of ended jobs and
copies. Rank 0 broadcasts each step before it runs it. It broadcasts steps while idle too, so a dead
rank is noticed. Ranks whose operations ended differently end the engine, whose adapters the
controller then records as lost.
"""

import time
import zlib
from typing import Final

import msgspec
from msgspec import Struct

from loradock.engine.parallel import ParallelGroup, RankLost
from loradock.engine.worker.engine import Engine, EngineCommand
from loradock.messages.commands import ControllerBeat, RequestInventory
from loradock.messages.ids import OpId
from loradock.messages.reports import EngineInventory, OperationFailed, OperationReport, Report
from loradock.messages.views import EngineStatistics
from loradock.messages.wire import COMMANDS


class LockstepStep(Struct, frozen=True, array_like=True):
    """Broadcast of rank 0; `digest`: of the outcomes of its operations before this step.

    `now_s`: its monotonic time, so that waits end in the same step on every rank.
    """

    commands: list[bytes] = []
    digest: int = 0
    now_s: float = 0.0
    is_last: bool = False


_STEPS: Final = msgspec.msgpack.Decoder(LockstepStep)


class OutcomeDigest:
    """A running digest of how operations ended, to be compared between ranks."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, report: Report) -> None:
        """Fold a report into the digest, without the fields that may differ between ranks."""
        if isinstance(report, OperationReport):
            code = report.code if isinstance(report, OperationFailed) else ""
            outcome = f"{report.__struct_config__.tag} {report.op} {code}\n"
            self.value = zlib.crc32(outcome.encode(), self.value)


class Leader:
    """Rank 0's engine, with the interface of `Engine`: its `step` is a step of all ranks."""

    def __init__(self, engine: Engine, group: ParallelGroup) -> None:
        self.engine_id: Final = engine.engine_id
        self._engine = engine
        self._group = group
        self._digest = OutcomeDigest()
        self._commands: list[EngineCommand] = []
        self._reports: list[Report] = []

    @property
    def is_idle(self) -> bool:
        """True if a step would only keep the ranks together."""
        return self._engine.is_idle and not self._commands

    @property
    def is_copying(self) -> bool:
        """True if a copy or a job is unfinished, on any rank; only a step finishes it."""
        return self._engine.is_copying or self._engine.has_jobs

    @property
    def last_op(self) -> OpId:
        """The highest operation that was started."""
        return self._engine.last_op

    @property
    def running(self) -> tuple[OpId, ...]:
        """Rank 0's requests that take part in the next step, which are those of every rank."""
        return self._engine.running

    def submit(self, command: EngineCommand) -> None:
        """Execute a command in the next step."""
        self._commands.append(command)

    def step(self) -> None:
        """Run a step on all ranks; raises `RankLost` if one is gone."""
        commands, self._commands = self._commands, []
        frames = [COMMANDS.encode(command) for command in commands]
        now_s = time.monotonic()
        self._broadcast(LockstepStep(frames, self._digest.value, now_s))
        self._reports += run_step(self._engine, commands, self._digest, now_s)

    def poll(self) -> list[Report]:
        """Return the reports since the last call, in order."""
        collected, self._reports = self._reports, []
        return collected

    def inventory(self) -> EngineInventory:
        """Return rank 0's inventory, which equals that of every rank."""
        return self._engine.inventory()

    def statistics(self) -> EngineStatistics:
        """Return rank 0's statistics."""
        return self._engine.statistics()

    def close(self) -> None:
        """End all ranks."""
        self._broadcast(LockstepStep(digest=self._digest.value, is_last=True))
        self._engine.close()

    def _broadcast(self, step: LockstepStep) -> None:
        self._group.broadcast_bytes(msgspec.msgpack.encode(step))


def follow(engine: Engine, group: ParallelGroup) -> None:
    """Run rank 0's steps until the last; raises `RankLost` if it is gone, or its digest differs."""
    digest = OutcomeDigest()
    while not (step := _STEPS.decode(group.broadcast_bytes(b""))).is_last:
        if step.digest != digest.value:
            raise RankLost(
                f"operations ended differently on rank {group.rank} and on rank 0; restart the "
                "engine on all ranks"
            )
        messages = [COMMANDS.decode(frame).message for frame in step.commands]
        # Commands of the link stay on rank 0, so the filter only narrows the type.
        commands = [
            message
            for message in messages
            if not isinstance(message, ControllerBeat | RequestInventory)
        ]
        run_step(engine, commands, digest, step.now_s)
    engine.close()


def run_step(
    engine: Engine, commands: list[EngineCommand], digest: OutcomeDigest, now_s: float
) -> list[Report]:
    """Run a step on this rank at rank 0's time; return the reports of its engine."""
    for command in commands:
        engine.submit(command)
    engine.step()
    collected = engine.poll(now_s)
    for report in collected:
        digest.add(report)
    return collected
