"""The controller's end of the engine link: numbers, acknowledgement, synchronisation, loss.

A sans-IO protocol: frames are arguments, frames and inputs for the log are results, and time is an
argument (nanoseconds of any monotonic clock).

No command is sent between a request for an inventory and the handling of that inventory, so that
the inventory covers every command that was sent. A command that is withheld or lost meanwhile is
not repeated here: the core finds from the inventory that the engine did not receive it, and issues
it again. Reports that arrive meanwhile are kept until the inventory arrives, because the first one
to arrive need not be the first one that the log lacks; if some are still missing then, they are
requested again. Only what is in the log is acknowledged, and what is in the log is acknowledged in
every later epoch too: no report is logged twice.

An engine that the log does not know, or whose loss it has, answers no operation of the log: the
reports that it sent before its inventory are dropped.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple

import structlog

from loradock.messages import commands, reports
from loradock.messages.ids import Epoch, OpId, Seq
from loradock.messages.views import EngineStatistics
from loradock.messages.wire import COMMANDS, REPORTS, DecodedFrame, WireError

BEAT_INTERVAL_NS: Final = 500_000_000
SYNC_RETRY_NS: Final = 1_000_000_000
LATE_FRAMES_NS: Final = 2_000_000_000
"""Frames can arrive for this long after the end of an engine's process, or of its connection."""

log = structlog.get_logger("link")


class Phase(Enum):
    """State of the synchronisation by inventory; commands are sent in `OPEN` only."""

    SYNCHRONISING = auto()
    ANSWERED = auto()
    OPEN = auto()


class NumberedReport(NamedTuple):
    """A report for the log, with the number of its frame."""

    report: reports.LoggedReport
    seq: Seq


class LinkOutput(NamedTuple):
    """Results of one iteration's frames: inputs for the log, and output that is never logged."""

    inputs: list[NumberedReport]
    private: list[reports.PrivateReport]


class EngineLink:
    """One epoch's link to the engine that is attached, if any."""

    def __init__(self, send: Callable[[bytes, bytes], None], timeout_ns: int) -> None:
        self.engine_id = ""
        # Of the engine's last heartbeat.
        self.statistics = EngineStatistics()
        self.running: frozenset[OpId] = frozenset()
        self._send = send
        self._timeout_ns: Final = timeout_ns
        self._epoch: Epoch = 0
        # The engine's connection, empty until one has sent something in this epoch; when each one
        # before it was replaced.
        self.peer = b""
        self._former_peers: dict[bytes, int] = {}
        # The highest numbers, of epoch and report, that a frame of the engine had.
        self._latest: tuple[Epoch, Seq] = (0, 0)
        self._phase = Phase.SYNCHRONISING
        # The number of this round's first request for an inventory; the time of its last one.
        self._requested: Seq = 0
        self._requested_ns = 0
        self._sent: Seq = 0
        # The last report returned by `receive`, and the last one that is in the log.
        self._delivered: Seq = 0
        self._logged: Seq = 0
        self._reordered: dict[Seq, reports.OperationReport] = {}
        self._received_ns = 0
        self._beat_ns = 0
        self._ended_id = ""
        self._ended_ns = 0
        # The engine whose inventory the log has, without a later loss; the one whose inventory
        # `receive` returned.
        self._known_id = self._answered_id = ""
        # The first number that the last inventory of this round lacked, 0 for none.
        self._missing: Seq = 0
        self._malformed = 0

    def start(self, epoch: Epoch, engine_id: str, now_ns: int, reported: Seq = 0) -> None:
        """Start an epoch; the engine that the log knows (if any) has the timeout to connect.

        `reported` is the number of its last report that is in the log.
        """
        self._epoch = epoch
        self.engine_id = self._known_id = engine_id
        self._delivered = self._logged = reported
        self._received_ns = now_ns

    @property
    def is_open(self) -> bool:
        """True if commands are sent to the engine."""
        return self._phase is Phase.OPEN

    def open(self) -> None:
        """Allow commands; called when the requested inventory is handled."""
        if self._phase is Phase.ANSWERED:
            self._phase = Phase.OPEN

    def receive(self, frames: list[tuple[bytes, bytes]], now_ns: int) -> LinkOutput:
        """Process one iteration's frames; call `on_logged` or `forget_unlogged` afterwards.

        Before `start` nothing is received: no log has this epoch.
        """
        output = LinkOutput([], [])
        for peer, data in frames if self._epoch else ():
            try:
                frame = REPORTS.decode(data)
            except WireError as error:
                self._count_malformed(error)
                continue
            if frame.epoch <= self._epoch:
                self._on_frame(peer, frame, output, now_ns)
        return output

    def _count_malformed(self, error: WireError) -> None:
        """Log the first, second, fourth, eighth..., so that a flood does not fill a disk."""
        self._malformed += 1
        if self._malformed & (self._malformed - 1) == 0:
            log.warning("malformed report", error=str(error), count=self._malformed)

    def _on_frame(
        self, peer: bytes, frame: DecodedFrame[reports.Report], output: LinkOutput, now_ns: int
    ) -> None:
        epoch, seq, report = frame
        if isinstance(report, reports.EngineInventory | reports.EngineBeat):
            if not self._admit(peer, report.engine_id, (epoch, seq), now_ns):
                return
        elif peer != self.peer:
            return
        self._received_ns = now_ns
        self._latest = max(self._latest, (epoch, seq))
        if isinstance(report, reports.PrivateReport):
            output.private.append(report)
        elif isinstance(report, reports.EngineInventory):
            # A frame of an earlier epoch answers a request of that epoch, not of this one.
            answers = report.answers if epoch == self._epoch else 0
            self._on_inventory(answers, seq, report, output, now_ns)
        elif isinstance(report, reports.EngineBeat):
            self.statistics, self.running = report.statistics, frozenset(report.running)
            self._on_beat(seq, now_ns)
        else:
            self._on_report(seq, report, output, now_ns)

    def _admit(self, peer: bytes, engine_id: str, numbers: tuple[Epoch, Seq], now_ns: int) -> bool:
        """Identify an engine by `engine_id`, not by address; only one may be attached."""
        if not engine_id or (self.engine_id and engine_id != self.engine_id):
            return False
        if engine_id == self._ended_id and now_ns - self._ended_ns < LATE_FRAMES_NS:
            return False
        if peer != self.peer:
            if engine_id != self.engine_id:
                self._delivered = self._logged = 0
            elif self._is_late(peer, numbers, now_ns):
                return False
            recent = {p: ns for p, ns in self._former_peers.items() if now_ns - ns < LATE_FRAMES_NS}
            self._former_peers = {**recent, self.peer: now_ns}
            self.engine_id, self.peer = engine_id, peer
            self._synchronise(now_ns)
        return True

    def _is_late(self, peer: bytes, numbers: tuple[Epoch, Seq], now_ns: int) -> bool:
        """Return whether a frame was in transit when the engine connected again.

        An engine's numbers never fall; equal ones tell nothing about the order.
        """
        replaced_ns = self._former_peers.get(peer, -LATE_FRAMES_NS)
        return numbers < self._latest or now_ns - replaced_ns < LATE_FRAMES_NS

    def _on_inventory(
        self,
        answers: Seq,
        seq: Seq,
        report: reports.EngineInventory,
        output: LinkOutput,
        now_ns: int,
    ) -> None:
        if self._phase is not Phase.SYNCHRONISING:
            # The engine introduces itself, saw a gap, or answers twice: get its current state.
            self._synchronise(now_ns)
        elif answers >= self._requested:
            numbered = self._resent()
            if self._lacks_reports(numbered, seq):
                self._synchronise(now_ns)
                return
            self._phase, self._answered_id = Phase.ANSWERED, self.engine_id
            output.inputs.extend(numbered)
            output.inputs.append(NumberedReport(report, seq))
            self._reordered.clear()
            self._delivered = seq

    def _resent(self) -> list[NumberedReport]:
        """Return the reports of this round in order; none of an engine that the log lacks."""
        if self.engine_id != self._known_id:
            return []
        return [NumberedReport(report, seq) for seq, report in sorted(self._reordered.items())]

    def _lacks_reports(self, numbered: list[NumberedReport], last_seq: Seq) -> bool:
        """Return whether a report up to `last_seq` was lost, unless the engine no longer has it.

        An engine resends all that are not acknowledged. If the log's tail is lost, it can
        have been acknowledged more: then another round lacks the same ones.
        """
        if self.engine_id != self._known_id:
            return False
        expected = self._delivered + 1
        for report in numbered:
            expected += report.seq == expected
        missing = expected if expected <= last_seq else 0
        is_lost = missing not in (0, self._missing)
        self._missing = missing if is_lost else 0
        return is_lost

    def _on_beat(self, seq: Seq, now_ns: int) -> None:
        if self._phase is Phase.OPEN and seq > self._delivered:
            self._synchronise(now_ns)

    def _on_report(
        self, seq: Seq, report: reports.OperationReport, output: LinkOutput, now_ns: int
    ) -> None:
        if seq <= self._delivered:
            return
        if self._phase is Phase.SYNCHRONISING:
            # Earlier ones can follow: the engine resends unacknowledged reports before it answers.
            self._reordered[seq] = report
        elif seq == self._delivered + 1:
            self._delivered = seq
            output.inputs.append(NumberedReport(report, seq))
        else:
            self._synchronise(now_ns)

    def send(self, command: commands.Command, now_ns: int) -> None:
        """Send a command; drop it while an inventory is awaited, which will lack it."""
        if self._phase is not Phase.OPEN:
            return
        if isinstance(command, commands.RequestInventory):
            self._synchronise(now_ns)
        else:
            self._transmit(command)

    def _transmit(self, command: commands.Command) -> None:
        if not isinstance(command, commands.ControllerBeat):
            self._sent += 1
        self._send(self.peer, COMMANDS.encode(command, self._epoch, self._sent))

    def _synchronise(self, now_ns: int) -> None:
        self._begin_round()
        self._request_inventory(now_ns)

    def _begin_round(self) -> None:
        # A round sends nothing but requests for an inventory, so any of their answers is valid.
        self._phase = Phase.SYNCHRONISING
        self._reordered.clear()
        self._requested = self._sent + 1

    def _request_inventory(self, now_ns: int) -> None:
        self._transmit(commands.RequestInventory(self._logged))
        self._requested_ns = now_ns

    def on_logged(self) -> None:
        """Acknowledge what `receive` returned: it is in the log."""
        self._logged = self._delivered
        if self._answered_id:
            self._known_id, self._answered_id = self._answered_id, ""

    def forget_unlogged(self, now_ns: int) -> None:
        """Have the engine resend, after a delay, what `receive` returned: it was not logged."""
        if self._delivered != self._logged or self._answered_id:
            self._delivered, self._answered_id = self._logged, ""
            self.synchronise_later(now_ns)

    def synchronise_later(self, now_ns: int) -> None:
        """Stop sending commands, and request another inventory after a delay."""
        self._begin_round()
        self._requested_ns = now_ns

    def tick(self, now_ns: int) -> None:
        """Send what is due: a heartbeat, or the request for an inventory again."""
        if not self.peer:
            return
        # An engine in a long forward pass is silent, but it has not lost the request.
        is_active = self._received_ns > self._requested_ns
        is_due = now_ns - self._requested_ns >= SYNC_RETRY_NS
        if self._phase is Phase.SYNCHRONISING and is_active and is_due:
            self._request_inventory(now_ns)
        if now_ns - self._beat_ns >= BEAT_INTERVAL_NS:
            self._beat_ns = now_ns
            self._transmit(commands.ControllerBeat(self._logged))

    def is_overdue(self, now_ns: int, step_since_ns: int | None = None) -> bool:
        """Return whether an engine is expected and has been silent for longer than the timeout.

        `step_since_ns`: the start of the step that its main loop is in, if known. An engine sends
        nothing during a step, whose bound is its supervisor's concern, so only silence before it
        counts.
        """
        until_ns = now_ns if step_since_ns is None else min(now_ns, step_since_ns)
        return bool(self.engine_id) and until_ns - self._received_ns > self._timeout_ns

    def extend_deadline(self, pause_ns: int) -> None:
        """Do not count a time in which the controller did not run, and perhaps no process did."""
        self._received_ns += pause_ns

    def detach(self, now_ns: int, *, ended: bool) -> None:
        """Forget the engine, so that the next one that introduces itself is attached.

        `ended`: its process has ended, so frames that still arrive from it are ignored.
        """
        if ended:
            self._ended_id, self._ended_ns = self.engine_id, now_ns
        self.engine_id, self._known_id, self._answered_id = "", "", ""
        self.peer, self._latest = b"", (0, 0)
        self._former_peers.clear()
        self.statistics, self.running = EngineStatistics(), frozenset()
        self._phase = Phase.SYNCHRONISING
