"""The controller's end of the engine link: numbers, acknowledgement, synchronisation, loss.

What it is: a sans-IO protocol; frames come in, frames and logged inputs go out, time is an argument
(nanoseconds of any clock that only goes forward). What it is not: a socket or a decision about
adapters. One rule: no command is sent from the question for an inventory until that inventory is
handled, so that it takes every command that was sent into account.

A command that is held back or lost meanwhile is not repeated here: the core sees from the
inventory that the engine never had it, and issues it again. Reports that come meanwhile are held
until the inventory is there, for the first one to arrive need not be the first one that the log
lacks. What is acknowledged is in the log, never only on its way there.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

import structlog

from messages import commands, reports
from messages.ids import Epoch, Seq
from messages.wire import COMMANDS, REPORTS, Frame, WireError

BEAT_INTERVAL_NS: Final = 500_000_000
SYNC_RETRY_NS: Final = 1_000_000_000
GHOST_NS: Final = 2_000_000_000
"""How long frames of an engine that has ended may still be on their way."""

log = structlog.get_logger("link")


class Phase(Enum):
    """Where the link stands with the engine's inventory."""

    ASKING = auto()
    ANSWERED = auto()
    OPEN = auto()


class LinkOutput(NamedTuple):
    """What became of one turn's frames: inputs for the log, and output that passes by it."""

    inputs: list[reports.LoggedReport]
    private: list[reports.PrivateReport]


class EngineLink:
    """One controller life's link to whichever engine is there."""

    def __init__(self, send: Callable[[bytes, bytes], None], timeout_ns: int) -> None:
        self.engine_id = ""
        self._send = send
        self._timeout_ns: Final = timeout_ns
        self._epoch: Epoch = 0
        self._peer = b""
        self._phase = Phase.ASKING
        # The first question of this round, and when the last one was put.
        self._asked: Seq = 0
        self._asked_ns = 0
        self._sent: Seq = 0
        # The last report that was handed out, and the last one that is in the log.
        self._taken: Seq = 0
        self._logged: Seq = 0
        self._early: dict[Seq, reports.OperationReport] = {}
        self._heard_ns = 0
        self._beat_ns = 0
        self._ended_id = ""
        self._ended_ns = 0
        self._malformed = 0

    def start(self, epoch: Epoch, engine_id: str, now_ns: int) -> None:
        """Begin a life; the engine that the log knows (if any) has the timeout to turn up."""
        self._epoch = epoch
        self.engine_id = engine_id
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
        """Take what engines sent in one turn; `note_logged` or `forget_unlogged` has to follow."""
        output = LinkOutput([], [])
        for peer, data in frames:
            try:
                frame = REPORTS.decode(data)
            except WireError as error:
                self._count_malformed(error)
                continue
            if frame.epoch <= self._epoch:
                self._take(peer, frame, output, now_ns)
        return output

    def _count_malformed(self, error: WireError) -> None:
        """Tell of the first, second, fourth, eighth..., so that a flood does not fill a disk."""
        self._malformed += 1
        if self._malformed & (self._malformed - 1) == 0:
            log.warning("malformed report", error=str(error), count=self._malformed)

    def _take(
        self, peer: bytes, frame: Frame[reports.Report], output: LinkOutput, now_ns: int
    ) -> None:
        epoch, seq, report = frame
        if isinstance(report, reports.EngineInventory | reports.EngineBeat):
            if not self._admit(peer, report.engine_id, now_ns):
                return
        elif peer != self._peer:
            return
        self._heard_ns = now_ns
        if isinstance(report, reports.PrivateReport):
            output.private.append(report)
        elif isinstance(report, reports.EngineInventory):
            # The number of a former life's question is nothing to this one.
            answers = report.answers if epoch == self._epoch else 0
            self._on_inventory(answers, seq, report, output, now_ns)
        elif isinstance(report, reports.EngineBeat):
            self._on_beat(seq, now_ns)
        else:
            self._on_report(seq, report, output, now_ns)

    def _admit(self, peer: bytes, engine_id: str, now_ns: int) -> bool:
        """Know an engine by its life, not its address; a second one waits for the first's end."""
        if not engine_id or (self.engine_id and engine_id != self.engine_id):
            return False
        if engine_id == self._ended_id and now_ns - self._ended_ns < GHOST_NS:
            return False
        if peer != self._peer:
            if engine_id != self.engine_id:
                self._taken = self._logged = 0
            self.engine_id, self._peer = engine_id, peer
            self._synchronise(now_ns)
        return True

    def _on_inventory(
        self,
        answers: Seq,
        seq: Seq,
        report: reports.EngineInventory,
        output: LinkOutput,
        now_ns: int,
    ) -> None:
        if self._phase is not Phase.ASKING:
            # It introduces itself, saw a gap, or was asked twice: ask what is true now.
            self._synchronise(now_ns)
        elif answers >= self._asked:
            self._phase = Phase.ANSWERED
            output.inputs.extend(self._early[number] for number in sorted(self._early))
            output.inputs.append(report)
            self._early.clear()
            self._taken = seq

    def _on_beat(self, seq: Seq, now_ns: int) -> None:
        if self._phase is Phase.OPEN and seq > self._taken:
            self._synchronise(now_ns)

    def _on_report(
        self, seq: Seq, report: reports.OperationReport, output: LinkOutput, now_ns: int
    ) -> None:
        if seq <= self._taken:
            return
        if self._phase is Phase.ASKING:
            # Earlier ones may follow: the engine repeats all that it keeps before it answers.
            self._early[seq] = report
        elif seq == self._taken + 1:
            self._taken = seq
            output.inputs.append(report)
        else:
            self._synchronise(now_ns)

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
        self._begin_round()
        self._ask(now_ns)

    def _begin_round(self) -> None:
        # Nothing is sent in a round but questions, so that the answer to any of them will do.
        self._phase = Phase.ASKING
        self._early.clear()
        self._asked = self._sent + 1

    def _ask(self, now_ns: int) -> None:
        self._transmit(commands.RequestInventory(self._logged))
        self._asked_ns = now_ns

    def note_logged(self) -> None:
        """What was handed out is in the log: the engine may forget it."""
        self._logged = self._taken

    def forget_unlogged(self, now_ns: int) -> None:
        """What was handed out could not be logged: have the engine send it again, in a while."""
        if self._taken != self._logged or self._phase is Phase.ANSWERED:
            self._taken = self._logged
            self.ask_later(now_ns)

    def ask_later(self, now_ns: int) -> None:
        """Close the link, and ask for another inventory in a while."""
        self._begin_round()
        self._asked_ns = now_ns

    def tick(self, now_ns: int) -> None:
        """Send what time asks for: a beat, or the question again."""
        if not self._peer:
            return
        # An engine in a long forward pass is silent and has not lost the question.
        heard = self._heard_ns > self._asked_ns
        if self._phase is Phase.ASKING and heard and now_ns - self._asked_ns >= SYNC_RETRY_NS:
            self._ask(now_ns)
        if now_ns - self._beat_ns >= BEAT_INTERVAL_NS:
            self._beat_ns = now_ns
            self._transmit(commands.ControllerBeat(self._logged))

    def is_overdue(self, now_ns: int) -> bool:
        """Whether an engine that should be there has been silent for too long."""
        return bool(self.engine_id) and now_ns - self._heard_ns > self._timeout_ns

    def lose(self, now_ns: int, *, ended: bool) -> None:
        """Forget the engine; the next one that introduces itself is taken.

        `ended`: its process is gone, so that what still comes from it comes from nobody.
        """
        if ended:
            self._ended_id, self._ended_ns = self.engine_id, now_ns
        self.engine_id, self._peer = "", b""
        self._phase = Phase.ASKING
