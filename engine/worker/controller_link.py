"""The engine's end of the link to its controller: numbers, epochs and what is not acknowledged yet.

What it is: bookkeeping over decoded frames. What it is not: a socket; `worker` has that. One rule:
an operation's report is kept until the controller says that it is in its log, whatever happened to
the frames that carried it.
"""

import structlog

from messages.commands import Command, ControllerBeat, RequestInventory
from messages.ids import Epoch, Seq
from messages.reports import EngineBeat, EngineInventory, OperationReport, PrivateReport, Report
from messages.wire import REPORTS, Frame

_log = structlog.get_logger()


class Link:
    """Both directions of one link.

    Commands are counted 1, 2, 3... in each life of the controller (`epoch`); a beat carries the
    last number and uses none. Reports of operations are counted 1, 2, 3... in this engine's life;
    every other report carries the last number. `needs_sync` says that one side may lack frames of
    the other: send what `unacknowledged` gives, then the inventory, and call `synchronised`. The
    inventory names as `asked` the frame that asked for it, 0 where none did.
    """

    def __init__(self) -> None:
        self.epoch: Epoch = 0
        self.needs_sync = True
        self.asked: Seq = 0
        self._command_seq: Seq = 0
        self._report_seq: Seq = 0
        self._kept: dict[Seq, OperationReport] = {}
        self._refused_epoch: Epoch | None = None

    def accept(self, frame: Frame[Command]) -> bool:
        """Take note of a command's number; False for one of a former controller's life."""
        if frame.epoch < self.epoch:
            self._refuse(frame.epoch)
            return False
        if frame.epoch > self.epoch:
            self.epoch, self._command_seq = frame.epoch, 0
        match frame.message:
            case ControllerBeat(acknowledged):
                self._acknowledge(acknowledged)
                expected = self._command_seq
            case RequestInventory(acknowledged):
                self._acknowledge(acknowledged)
                self.needs_sync, self.asked = True, frame.seq
                expected = self._command_seq + 1
            case _:
                expected = self._command_seq + 1
        if frame.seq > expected:
            self.needs_sync = True
        self._command_seq = max(self._command_seq, frame.seq)
        return True

    def encode(self, report: Report) -> bytes:
        """The frame of a new report; that of an operation gets a number and is kept."""
        if not isinstance(report, PrivateReport | EngineBeat | EngineInventory):
            self._report_seq += 1
            self._kept[self._report_seq] = report
        return REPORTS.encode(report, self.epoch, self._report_seq)

    def unacknowledged(self) -> list[bytes]:
        """The frames of all kept reports, in order, with the numbers that they always had."""
        return [REPORTS.encode(report, self.epoch, seq) for seq, report in self._kept.items()]

    def synchronised(self) -> None:
        """Say that all of it was sent."""
        self.needs_sync, self.asked = False, 0

    def _acknowledge(self, seq: Seq) -> None:
        if seq > self._report_seq:
            _log.warning("acknowledged beyond what was reported", seq=seq, last=self._report_seq)
            return
        for known in [known for known in self._kept if known <= seq]:
            del self._kept[known]

    def _refuse(self, epoch: Epoch) -> None:
        if epoch != self._refused_epoch:
            self._refused_epoch = epoch
            _log.warning("a former controller still sends commands", epoch=epoch, now=self.epoch)
