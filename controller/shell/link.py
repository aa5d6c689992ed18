"""The controller's end of the engine link: numbers, acknowledgement, synchronisation, loss.

What it is: a sans-IO protocol; frames come in, frames and logged inputs go out, time is an
argument. What it is not: a socket or a decision about adapters. One rule: no command is sent from
the question for an inventory until that inventory is handled, so that it takes every command that
was sent into account.

A command that is held back or lost meanwhile is not repeated here: the core sees from the
inventory that the engine never had it, and issues it again.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

import structlog

from messages import commands, reports
from messages.ids import Epoch, Seq
from messages.wire import COMMANDS, REPORTS, WireError

BEAT_INTERVAL_NS: Final = 500_000_000
SYNC_RETRY_NS: Final = 1_000_000_000

log = structlog.get_logger("link")


class Phase(Enum):
    """Where the link stands with the engine's inventory."""

    ASKING = auto()
    ANSWERED = auto()
    OPEN = auto()


class LinkOutput(NamedTuple):
    """What became of one turn's frames: inputs for the log, and tokens that pass by it."""

    inputs: list[reports.LoggedReport]
    tokens: list[reports.TokensGenerated]


class EngineLink:
    """One controller life's link to whichever engine is there."""

    def __init__(self, send: Callable[[bytes, bytes], None], timeout_ns: int) -> None:
        self.engine_id = ""
        self.pid = 0
        self._send = send
        self._timeout_ns: Final = timeout_ns
        self._epoch: Epoch = 0
        self._peer = b""
        self._phase = Phase.ASKING
        self._asked: Seq = 0
        self._asked_ns = 0
        self._sent: Seq = 0
        self._logged: Seq = 0
        self._heard_ns = 0
        self._beat_ns = 0

    def start(self, epoch: Epoch, engine_id: str, pid: int, now_ns: int) -> None:
        """Begin a life; the engine that the log knows (if any) has the timeout to turn up."""
        self._epoch = epoch
        self.engine_id, self.pid = engine_id, pid
        self._heard_ns = now_ns

    @property
    def is_open(self) -> bool:
        """Whether commands reach the engine."""
        return self._phase is Phase.OPEN

    def open(self) -> None:
        """The inventory that was asked for is being handled: what it leads to may be sent."""
        if self._phase is Phase.ANSWERED:
            self._phase = Phase.OPEN

    def receive(self, frames: list[tuple[bytes, bytes]], now_ns: int) -> LinkOutput:
        """Take what engines sent in one turn."""
        output = LinkOutput([], [])
        for peer, data in frames:
            try:
                frame = REPORTS.decode(data)
            except WireError as error:
                log.warning("a frame from an engine is refused", error=str(error))
                continue
            if frame.epoch <= self._epoch:
                self._take(peer, frame.seq, frame.message, output, now_ns)
        return output

    def _take(
        self, peer: bytes, seq: Seq, report: reports.Report, output: LinkOutput, now_ns: int
    ) -> None:
        if isinstance(report, reports.EngineInventory | reports.EngineBeat):
            if not self._admit(peer, report.engine_id, now_ns):
                return
        elif peer != self._peer:
            return
        self._heard_ns = now_ns
        if isinstance(report, reports.TokensGenerated):
            output.tokens.append(report)
        elif isinstance(report, reports.EngineInventory):
            self._on_inventory(seq, report, output, now_ns)
        elif isinstance(report, reports.EngineBeat):
            self._on_beat(seq, now_ns)
        else:
            self._on_report(seq, report, output, now_ns)

    def _admit(self, peer: bytes, engine_id: str, now_ns: int) -> bool:
        """Know an engine by its life, not its address; a second one waits for the first's end."""
        if peer == self._peer:
            return True
        if self.engine_id and engine_id != self.engine_id:
            return False
        self.engine_id, self._peer = engine_id, peer
        self._sent, self._logged = 0, 0
        self._synchronise(now_ns)
        return True

    def _on_inventory(
        self, seq: Seq, report: reports.EngineInventory, output: LinkOutput, now_ns: int
    ) -> None:
        if self._phase is not Phase.ASKING or report.answers != self._asked:
            # It introduces itself or saw a gap; only an inventory that was asked for counts.
            if self._phase is Phase.OPEN:
                self._synchronise(now_ns)
            return
        self._phase = Phase.ANSWERED
        self._logged = seq
        self.pid = report.pid
        output.inputs.append(report)

    def _on_beat(self, seq: Seq, now_ns: int) -> None:
        if self._phase is Phase.OPEN and seq > self._logged:
            self._synchronise(now_ns)

    def _on_report(
        self, seq: Seq, report: reports.OperationReport, output: LinkOutput, now_ns: int
    ) -> None:
        if seq <= self._logged:
            return
        if self._phase is not Phase.ASKING and seq != self._logged + 1:
            self._synchronise(now_ns)
            return
        self._logged = seq
        output.inputs.append(report)

    def send(self, command: commands.Command, now_ns: int) -> None:
        """Send a command, unless an inventory is awaited, which will show that it is missing."""
        if self._phase is not Phase.OPEN:
            return
        if isinstance(command, commands.RequestInventory):
            self._synchronise(now_ns)
        else:
            self._transmit(command)

    def _transmit(self, command: commands.Command) -> None:
        if not isinstance(command, commands.ControllerBeat):
            self._sent += 1
        self._send(self._peer, COMMANDS.encode(command, self._epoch, self._sent))

    def _synchronise(self, now_ns: int) -> None:
        self._phase = Phase.ASKING
        self._transmit(commands.RequestInventory(self._logged))
        self._asked, self._asked_ns = self._sent, now_ns

    def forget_unlogged(self, count: int, now_ns: int) -> None:
        """The last `count` reports could not be logged: have the engine send them again."""
        self._logged -= count
        self._phase = Phase.ASKING
        self._asked_ns = now_ns

    def tick(self, now_ns: int) -> None:
        """Send what time asks for: a beat, or the question again."""
        if not self._peer:
            return
        if self._phase is Phase.ASKING and now_ns - self._asked_ns >= SYNC_RETRY_NS:
            self._synchronise(now_ns)
        if now_ns - self._beat_ns >= BEAT_INTERVAL_NS:
            self._beat_ns = now_ns
            self._transmit(commands.ControllerBeat(self._logged))

    def is_overdue(self, now_ns: int) -> bool:
        """Whether an engine that should be there has been silent for too long."""
        return bool(self.engine_id) and now_ns - self._heard_ns > self._timeout_ns

    def lose(self) -> None:
        """Forget the engine; the next one that introduces itself is taken."""
        self.engine_id, self.pid, self._peer = "", 0, b""
        self._phase = Phase.ASKING
