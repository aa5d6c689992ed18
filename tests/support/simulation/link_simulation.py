"""A simulation of the engine link: both real protocol objects, in minimal processes.

The connection can be cut, both processes can be killed, and time is a number. Everything that is
sent and logged is recorded for the laws in `test_engine_link`. The controller issues an operation
for each task, and another one if an inventory shows that the last one did not arrive.
"""

from dataclasses import dataclass, field

from loradock.controller.server.engine_link import EngineLink
from loradock.engine.worker.controller_link import ControllerLink
from loradock.messages import commands, reports
from loradock.messages.ids import Seq
from loradock.messages.wire import COMMANDS

SECOND_NS = 1_000_000_000
TIMEOUT_NS = 10 * SECOND_NS


@dataclass
class Connection:
    """One connection, with the frames in flight in each direction, oldest first."""

    name: bytes
    is_up: bool = True
    to_engine: list[bytes] = field(default_factory=list)
    to_controller: list[bytes] = field(default_factory=list)


class LinkedEngine:
    """An engine process, with a loop like the worker's."""

    def __init__(self, number: int) -> None:
        self.engine_id = f"engine-{number}"
        self.link = ControllerLink()
        self.running: list[int] = []
        self.executed: list[int] = []
        self.reported: list[int] = []
        self.last_op = 0
        self.outbox: list[reports.Report] = []

    def receive(self, data: bytes) -> None:
        frame = COMMANDS.decode(data)
        command = frame.message
        if self.link.accept(frame) and isinstance(command, commands.DropWeights):
            self.last_op = max(self.last_op, command.op)
            self.executed.append(command.op)
            self.running.append(command.op)

    def finish_one(self, which: int) -> None:
        """End a running operation, not always the oldest one."""
        if self.running:
            op = self.running.pop(which % len(self.running))
            self.reported.append(op)
            self.outbox.append(reports.WeightsDropped(op))

    def send(self, connection: Connection | None, beat: bool) -> None:
        for report in self.outbox:
            frame = self.link.encode(report)
            if not self.link.needs_sync and not _send(connection, frame):
                self.link.needs_sync = True
        self.outbox.clear()
        if self.link.needs_sync and connection is not None and connection.is_up:
            for frame in self.link.unacknowledged_frames():
                _send(connection, frame)
            _send(connection, self.link.encode(self._inventory()))
            self.link.mark_synchronised()
        if beat:
            _send(connection, self.link.encode(reports.EngineBeat(self.engine_id, self.last_op)))

    def _inventory(self) -> reports.EngineInventory:
        return reports.EngineInventory(
            *(self.engine_id, 1, "m", 1, 1, self.last_op, tuple(self.running), ()),
            answers=self.link.inventory_request_seq,
        )


def _send(connection: Connection | None, frame: bytes) -> bool:
    if connection is None or not connection.is_up:
        return False
    connection.to_controller.append(frame)
    return True


@dataclass
class DurableState:
    """The state that a controller recovers from its log: it survives every crash."""

    epoch: int = 0
    engine_id: str = ""
    next_op: int = 1
    # Operations that have not ended, and the task of each.
    open: dict[int, int] = field(default_factory=dict)
    unsent: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    tasks: int = 0
    # The number of the attached engine's last report in the log.
    reported: Seq = 0
    losses: int = 0
    # Engine, number of losses and operation of each logged report. Between two losses of the
    # engine, no report may be logged twice, in however many epochs.
    inputs: list[tuple[str, int, int]] = field(default_factory=list)
    # By engine: operations that an inventory showed as not received.
    lost: dict[str, list[int]] = field(default_factory=dict)
    # By engine: the last report before it was attached, which answers no operation of the log.
    before: dict[str, Seq] = field(default_factory=dict)


class LinkedController:
    """A controller process: it logs the inputs that the link returns, then handles them."""

    def __init__(self, state: DurableState, now_ns: int) -> None:
        self.state = state
        state.epoch += 1
        self.outgoing: list[tuple[bytes, bytes]] = []
        self.last_operation: Seq = 0
        # Handled inventories that do not cover an operation sent after their request.
        self.overtaken: list[reports.EngineInventory] = []
        self.link = EngineLink(self._on_send, TIMEOUT_NS)
        self.link.start(state.epoch, state.engine_id, now_ns, state.reported)

    def _on_send(self, peer: bytes, data: bytes) -> None:
        _, seq, command = COMMANDS.decode(data)
        if isinstance(command, commands.DropWeights):
            self.last_operation = seq
        self.outgoing.append((peer, data))

    def add_task(self, now_ns: int) -> None:
        self.state.tasks += 1
        self.state.unsent.append(self.state.tasks)
        self._issue(now_ns)

    def iterate(
        self, frames: list[tuple[bytes, bytes]], now_ns: int, log: str, engine_ended: bool
    ) -> bool:
        """Run one iteration; return False if it crashed.

        `log`: "ok", "full", or where it crashes. After a crash the logged inputs are recovered, but
        the commands that they led to were not sent.
        """
        output = self.link.receive(frames, now_ns)
        if log == "crash before the log":
            return False
        sent = len(self.outgoing)
        if output.inputs and log == "full":
            self.link.forget_unlogged(now_ns)
        elif output.inputs:
            self.link.on_logged()
            for report, seq in output.inputs:
                self._handle(report, seq, now_ns)
                if self.state.engine_id:
                    self.state.reported = seq
        if log == "crash after the log":
            del self.outgoing[sent:]
            return False
        if engine_ended or self.link.is_overdue(now_ns):
            self.link.detach(now_ns, ended=engine_ended)
            self._on_lost()
        self.link.tick(now_ns)
        return True

    def _handle(self, report: reports.LoggedReport, seq: Seq, now_ns: int) -> None:
        if isinstance(report, reports.EngineInventory):
            if self.last_operation > report.answers:
                self.overtaken.append(report)
            self.link.open()
            self._on_inventory(report, seq)
        else:
            self._on_report(report)
        self._issue(now_ns)

    def _on_report(self, report: reports.OperationReport) -> None:
        state = self.state
        state.inputs.append((self.link.engine_id, state.losses, report.op))
        if report.op in state.open:
            task = state.open.pop(report.op)
            state.done.append(task)
            if task % 3 == 0:
                # One operation may lead to another one, as a load leads to a stage.
                state.tasks += 1
                state.unsent.append(state.tasks)

    def _on_inventory(self, report: reports.EngineInventory, seq: Seq) -> None:
        state = self.state
        if state.engine_id != report.engine_id:
            state.before[report.engine_id] = seq
        if state.engine_id not in ("", report.engine_id):
            self._on_lost()
        state.engine_id = report.engine_id
        state.next_op = max(state.next_op, report.last_op + 1)
        lost = [op for op in state.open if op not in report.running]
        state.lost.setdefault(report.engine_id, []).extend(lost)
        state.unsent += [state.open.pop(op) for op in lost]

    def _on_lost(self) -> None:
        self.state.losses += 1
        self.state.engine_id = ""
        self.state.reported = 0
        self.state.unsent += list(self.state.open.values())
        self.state.open.clear()

    def _issue(self, now_ns: int) -> None:
        state = self.state
        if not state.engine_id:
            return
        while state.unsent:
            state.open[state.next_op] = state.unsent.pop(0)
            self.link.send(commands.DropWeights(state.next_op, 1), now_ns)
            state.next_op += 1


class Simulation:
    """Controllers and engines, one of each at a time, and the connections between them."""

    def __init__(self) -> None:
        self.now_ns = 100 * SECOND_NS
        self.state = DurableState()
        self.controller: LinkedController | None = None
        self.engines: list[LinkedEngine] = []
        self.connections: list[Connection] = []
        self._ended = False
        self.start_controller()
        self.start_engine()

    @property
    def engine(self) -> LinkedEngine:
        return self.engines[-1]

    @property
    def connection(self) -> Connection | None:
        return self.connections[-1] if self.connections else None

    def start_controller(self) -> None:
        if self.controller is None:
            self.controller = LinkedController(self.state, self.now_ns)
            self.reconnect(0, 0)

    def kill_controller(self, kept: int) -> None:
        """End the controller; the engine still receives up to `kept` frames."""
        self.controller = None
        for connection in self.connections:
            connection.is_up = False
            connection.to_controller.clear()
            del connection.to_engine[kept:]

    def start_engine(self) -> None:
        self.engines.append(LinkedEngine(len(self.engines)))
        for connection in self.connections:
            connection.to_engine.clear()
        self.reconnect(2, 0)

    def kill_engine(self) -> None:
        self._ended = self.controller is not None
        self.start_engine()

    def reconnect(self, to_controller: int, to_engine: int) -> None:
        """Cut the connection; the given number of frames per direction still arrives."""
        for connection in self.connections:
            connection.is_up = False
            del connection.to_controller[to_controller:]
            del connection.to_engine[to_engine:]
        if self.controller is not None:
            self.connections.append(Connection(f"connection-{len(self.connections)}".encode()))

    def add_task(self) -> None:
        if self.controller is not None:
            self.controller.add_task(self.now_ns)
            self._deliver()

    def run_controller(self, count: int, log: str = "ok") -> None:
        """Run an iteration that reads up to `count` frames, those of old connections first."""
        if self.controller is None:
            return
        frames: list[tuple[bytes, bytes]] = []
        for connection in self.connections:
            while connection.to_controller and len(frames) < count:
                frames.append((connection.name, connection.to_controller.pop(0)))
        ended, self._ended = self._ended, False
        survived = self.controller.iterate(frames, self.now_ns, log, ended)
        self._deliver()
        if not survived:
            self.kill_controller(1_000)

    def _deliver(self) -> None:
        """Deliver frames as a ROUTER does: those for a closed connection are dropped."""
        assert self.controller is not None
        by_name = {
            connection.name: connection for connection in self.connections if connection.is_up
        }
        for peer, data in self.controller.outgoing:
            if peer in by_name:
                by_name[peer].to_engine.append(data)
        self.controller.outgoing.clear()

    def run_engine(self, count: int, works: bool, beat: bool) -> None:
        """Run an iteration that reads up to `count` frames, those of old connections first.

        An engine has one socket with one endpoint, whose frames stay in order over reconnections.
        """
        read = 0
        for connection in self.connections:
            while connection.to_engine and read < count:
                self.engine.receive(connection.to_engine.pop(0))
                read += 1
        if works:
            self.engine.finish_one(count)
        self.engine.send(self.connection, beat)

    def settle(self) -> None:
        """Run without further failures until every task can be done."""
        self.start_controller()
        for _ in range(60):
            self.now_ns += SECOND_NS // 2
            for _ in range(3):
                self.run_engine(1_000, True, True)
                self.run_controller(1_000)
