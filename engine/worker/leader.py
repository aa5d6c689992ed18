"""An engine of several ranks: rank 0 decides what all do, turn by turn.

What it is: the leader, which has an engine's face and tells the others each turn before it takes
it, and the others' loop. What it is not: the work (`engine.engine`), or what ends at different
times on different ranks (`engine.agreement`). One rule: all ranks take the same turns, and ranks
that are found to differ end the engine, whose adapters the controller then knows as lost.

A turn is the commands that came since the last one, one step of all generations, and a look at what
has ended. It is told also while nothing happens, so that a rank that is gone is missed.
"""

import zlib
from typing import Final

import msgspec
from msgspec import Struct

from engine.parallel import ParallelGroup, RankLost
from engine.worker.engine import Engine, EngineCommand
from messages.commands import ControllerBeat, RequestInventory
from messages.ids import OpId
from messages.reports import EngineInventory, OperationFailed, OperationReport, Report
from messages.wire import COMMANDS


class Turn(Struct, frozen=True, array_like=True):
    """What rank 0 tells the others; `books`: what its operations had come to before this turn."""

    commands: list[bytes] = []
    books: int = 0
    is_last: bool = False


_TURNS: Final = msgspec.msgpack.Decoder(Turn)


class Books:
    """A running digest of how operations ended, to be compared between ranks."""

    def __init__(self) -> None:
        self.digest = 0

    def enter(self, report: Report) -> None:
        """Take note of a report, but of nothing in it that ranks may say differently."""
        if isinstance(report, OperationReport):
            code = report.code if isinstance(report, OperationFailed) else ""
            entry = f"{report.__struct_config__.tag} {report.op} {code}\n"
            self.digest = zlib.crc32(entry.encode(), self.digest)


class Leader:
    """Rank 0's engine, as `worker` drives any: its `step` is a turn of all ranks."""

    def __init__(self, engine: Engine, group: ParallelGroup) -> None:
        self.engine_id: Final = engine.engine_id
        self._engine = engine
        self._group = group
        self._books = Books()
        self._commands: list[EngineCommand] = []
        self._told: list[Report] = []

    @property
    def is_idle(self) -> bool:
        """Whether a turn would do nothing but keep the ranks together."""
        return self._engine.is_idle and not self._commands

    @property
    def is_copying(self) -> bool:
        """Whether something ends that only a turn sees: a copy, or a job on another rank."""
        return self._engine.is_copying or self._engine.has_jobs

    @property
    def last_op(self) -> OpId:
        """The highest operation that was submitted and done or begun."""
        return self._engine.last_op

    def submit(self, command: EngineCommand) -> None:
        """Do a command in the next turn."""
        self._commands.append(command)

    def step(self) -> None:
        """Take a turn on all ranks; raises `RankLost` where one is gone."""
        commands, self._commands = self._commands, []
        self._tell(Turn([COMMANDS.encode(command) for command in commands], self._books.digest))
        self._told += take_turn(self._engine, commands, self._books)

    def poll(self) -> list[Report]:
        """Everything that happened since the last call, in order."""
        told, self._told = self._told, []
        return told

    def inventory(self) -> EngineInventory:
        """Who this engine is and what it holds, on every rank alike."""
        return self._engine.inventory()

    def close(self) -> None:
        """Let all ranks end."""
        self._tell(Turn(books=self._books.digest, is_last=True))
        self._engine.close()

    def _tell(self, turn: Turn) -> None:
        self._group.broadcast_bytes(msgspec.msgpack.encode(turn))


def follow(engine: Engine, group: ParallelGroup) -> None:
    """Take rank 0's turns until the last; raises `RankLost` where it is gone, or differs."""
    books = Books()
    while not (turn := _TURNS.decode(group.broadcast_bytes(b""))).is_last:
        if turn.books != books.digest:
            raise RankLost(
                f"rank {group.rank} and rank 0 do not agree on how operations ended; all of the "
                "engine has to start again"
            )
        messages = [COMMANDS.decode(frame).message for frame in turn.commands]
        # The others are the link's own, which stay with rank 0; so there are none.
        commands = [
            message
            for message in messages
            if not isinstance(message, ControllerBeat | RequestInventory)
        ]
        take_turn(engine, commands, books)
    engine.close()


def take_turn(engine: Engine, commands: list[EngineCommand], books: Books) -> list[Report]:
    """What every rank does in a turn; the reports of its engine."""
    for command in commands:
        engine.submit(command)
    engine.step()
    told = engine.poll()
    for report in told:
        books.enter(report)
    return told
