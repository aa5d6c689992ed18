"""The engine's end of the link to its controller: sequence numbers, epochs, acknowledgements.

It works on decoded frames, without a socket. The report of an operation is kept until the
controller acknowledges that it is in the log, even if the frames that carried it were lost.
"""

import structlog

from loradock.messages.commands import Command, ControllerBeat, RequestInventory
from loradock.messages.ids import Epoch, Seq
from loradock.messages.reports import (
    EngineBeat,
    EngineInventory,
    OperationReport,
    PrivateReport,
    Report,
)
from loradock.messages.wire import REPORTS, DecodedFrame

_log = structlog.get_logger()


class ControllerLink:
    """Both directions of the link.

    Commands are numbered 1, 2, 3... in each epoch, the lifetime of one controller process; a beat
    carries the last number and takes none. Reports of operations are numbered 1, 2, 3... in the
    lifetime of this engine; any other report carries the last number.
    `needs_sync`: one side may lack frames of the other. Send `unacknowledged_frames`, then the
    inventory, and call `mark_synchronised`. `inventory_request_seq`: the number of the frame that
    requested the inventory, 0 for none.
    """

    def __init__(self) -> None:
        self.epoch: Epoch = 0
        self.needs_sync = True
        self.inventory_request_seq: Seq = 0
        self._command_seq: Seq = 0
        self._report_seq: Seq = 0
        self._unacknowledged: dict[Seq, OperationReport] = {}
        self._refused_epoch: Epoch | None = None

    def accept(self, frame: DecodedFrame[Command]) -> bool:
        """Record a command's number; False for a command that must not be executed.

        One of an earlier epoch must not, nor one that arrives after a later one: commands mean the
        state that those before them have led to. The gap has asked for the inventory, by which the
        controller finds what was lost.
        """
        if frame.epoch < self.epoch:
            self._refuse(frame.epoch)
            return False
        if frame.epoch > self.epoch:
            self.epoch, self._command_seq = frame.epoch, 0
        is_beat = isinstance(frame.message, ControllerBeat)
        expected = self._command_seq + (not is_beat)
        if frame.seq < expected and not is_beat:
            return False
        if isinstance(frame.message, ControllerBeat | RequestInventory):
            self._acknowledge(frame.message.acknowledged)
        if isinstance(frame.message, RequestInventory):
            self.needs_sync, self.inventory_request_seq = True, frame.seq
        if frame.seq > expected:
            self.needs_sync = True
        self._command_seq = max(self._command_seq, frame.seq)
        return True

    def encode(self, report: Report) -> bytes:
        """Return the frame of a new report; that of an operation is numbered and kept."""
        if not isinstance(report, PrivateReport | EngineBeat | EngineInventory):
            self._report_seq += 1
            self._unacknowledged[self._report_seq] = report
        return REPORTS.encode(report, self.epoch, self._report_seq)

    def unacknowledged_frames(self) -> list[bytes]:
        """Return the frames of all kept reports, in order, with their first numbers."""
        kept = self._unacknowledged.items()
        return [REPORTS.encode(report, self.epoch, seq) for seq, report in kept]

    def mark_synchronised(self) -> None:
        """Record that the unacknowledged frames and the inventory were sent."""
        self.needs_sync, self.inventory_request_seq = False, 0

    def _acknowledge(self, seq: Seq) -> None:
        if seq > self._report_seq:
            _log.warning("acknowledged a report never sent", seq=seq, last=self._report_seq)
            return
        for known in [known for known in self._unacknowledged if known <= seq]:
            del self._unacknowledged[known]

    def _refuse(self, epoch: Epoch) -> None:
        if epoch != self._refused_epoch:
            self._refused_epoch = epoch
            _log.warning("a former controller still sends commands", epoch=epoch, now=self.epoch)
