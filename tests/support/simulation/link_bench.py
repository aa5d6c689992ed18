"""A link without a peer: a test returns it reports and sees the frames that it sends."""

from loradock.controller.server.engine_link import EngineLink
from loradock.messages import commands, reports
from loradock.messages.wire import COMMANDS, REPORTS, DecodedFrame
from tests.support.simulation.link_simulation import SECOND_NS, TIMEOUT_NS

EPOCH = 7
DROP = commands.DropWeights(1, 1)


class LinkBench:
    """A link, and the frames that it sent; time changes only where a test sets `now_ns`."""

    def __init__(self, engine_id: str = "", reported: int = 0) -> None:
        self.sent: list[tuple[bytes, DecodedFrame[commands.Command]]] = []
        self.link = EngineLink(self._on_send, TIMEOUT_NS)
        self.now_ns = 100 * SECOND_NS
        self.link.start(EPOCH, engine_id, self.now_ns, reported)

    def _on_send(self, peer: bytes, data: bytes) -> None:
        self.sent.append((peer, COMMANDS.decode(data)))

    def receive(
        self, *numbered: tuple[reports.Report, int], peer: bytes = b"a", epoch: int = EPOCH
    ) -> list[reports.Report]:
        """Pass reports to the link; return its inputs for the log, which count as logged."""
        frames = [(peer, REPORTS.encode(report, epoch, seq)) for report, seq in numbered]
        output = self.link.receive(frames, self.now_ns)
        self.link.on_logged()
        return [numbered.report for numbered in output.inputs]

    def take_sent(self) -> list[tuple[bytes, DecodedFrame[commands.Command]]]:
        sent, self.sent = self.sent, []
        return sent

    def inventory_request(self, peer: bytes = b"a") -> int:
        """Take the sent frames; return the number of the only inventory request of them."""
        [(to, frame)] = [sent for sent in self.take_sent() if is_inventory_request(sent[1])]
        assert to == peer
        return frame.seq

    def opened(self, seq: int = 0) -> "LinkBench":
        """Attach engine `e`, which has sent `seq` reports."""
        self.receive(beat("e", seq))
        self.receive(inventory("e", self.inventory_request(), seq))
        self.link.open()
        assert self.link.is_open
        return self


def is_inventory_request(frame: DecodedFrame[commands.Command]) -> bool:
    return isinstance(frame.message, commands.RequestInventory)


def beat(engine_id: str, seq: int) -> tuple[reports.Report, int]:
    return reports.EngineBeat(engine_id, 0), seq


def inventory(engine_id: str, answers: int, seq: int) -> tuple[reports.Report, int]:
    return reports.EngineInventory(engine_id, 1, "m", 1, 1, answers=answers), seq


def dropped(seq: int) -> tuple[reports.Report, int]:
    return reports.WeightsDropped(100 + seq), seq


def ops(inputs: list[reports.Report]) -> list[int]:
    return [report.op - 100 for report in inputs if isinstance(report, reports.WeightsDropped)]
