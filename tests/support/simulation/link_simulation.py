"""Both ends of the engine link between a controller and an engine that are made of nothing else.

What it is: the two real protocol objects, each in the smallest process that keeps its promises, and
a wire that can be cut. What it is not: time, sockets or adapters. One rule: everything that is said
here is remembered, so that the laws in `test_engine_link` can be held against it.

A wish is one thing that somebody wants done. The controller makes an operation of it, and another
one whenever an inventory shows that the last one never got there.
"""

from dataclasses import dataclass, field

from controller.shell.engine_link import EngineLink
from engine.worker.controller_link import Link
from messages import commands, reports
from messages.ids import Seq
from messages.wire import COMMANDS

SECOND_NS = 1_000_000_000
TIMEOUT_NS = 10 * SECOND_NS


@dataclass
class Line:
    """One connection: what is under way in each direction, oldest first."""

    name: bytes
    is_up: bool = True
    to_engine: list[bytes] = field(default_factory=list)
    to_controller: list[bytes] = field(default_factory=list)


class Engine:
    """One life of an engine; its loop is the worker's."""

    def __init__(self, number: int) -> None:
        self.engine_id = f"engine-{number}"
        self.link = Link()
        self.running: list[int] = []
        self.executed: list[int] = []
        self.told: list[int] = []
        self.last_op = 0
        self.outbox: list[reports.Report] = []

    def take(self, data: bytes) -> None:
        frame = COMMANDS.decode(data)
        command = frame.message
        if self.link.accept(frame) and isinstance(command, commands.DropWeights):
            self.last_op = max(self.last_op, command.op)
            self.executed.append(command.op)
            self.running.append(command.op)

    def work(self, which: int) -> None:
        """Some running operation ends; not always the oldest one."""
        if self.running:
            op = self.running.pop(which % len(self.running))
            self.told.append(op)
            self.outbox.append(reports.WeightsDropped(op))

    def speak(self, line: Line | None, beat: bool) -> None:
        for report in self.outbox:
            frame = self.link.encode(report)
            if not self.link.needs_sync and not _send(line, frame):
                self.link.needs_sync = True
        self.outbox.clear()
        if self.link.needs_sync and line is not None and line.is_up:
            for frame in self.link.unacknowledged():
                _send(line, frame)
            _send(line, self.link.encode(self._inventory()))
            self.link.synchronised()
        if beat:
            _send(line, self.link.encode(reports.EngineBeat(self.engine_id, self.last_op)))

    def _inventory(self) -> reports.EngineInventory:
        return reports.EngineInventory(
            *(self.engine_id, 1, "m", 1, 1, self.last_op, tuple(self.running), ()),
            answers=self.link.asked,
        )


def _send(line: Line | None, frame: bytes) -> bool:
    if line is None or not line.is_up:
        return False
    line.to_controller.append(frame)
    return True


@dataclass
class Books:
    """What a controller's log adds up to: it survives every crash."""

    epoch: int = 0
    engine_id: str = ""
    next_op: int = 1
    # Operations without an end, and the wish of each.
    open: dict[int, int] = field(default_factory=dict)
    unsent: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    wishes: int = 0
    losses: int = 0
    # Reports, by engine and by the stretch in which it was neither lost nor the controller dead.
    inputs: list[tuple[str, tuple[int, int], int]] = field(default_factory=list)
    # By engine: what an inventory showed as never received.
    lost: dict[str, list[int]] = field(default_factory=dict)


class Controller:
    """One life of a controller: logs what the link hands out, then acts on it."""

    def __init__(self, books: Books, now_ns: int) -> None:
        self.books = books
        books.epoch += 1
        self.outgoing: list[tuple[bytes, bytes]] = []
        self.last_operation: Seq = 0
        # Inventories that were handled, and that operations had been sent behind the question of.
        self.overtaken: list[reports.EngineInventory] = []
        self.link = EngineLink(self._on_send, TIMEOUT_NS)
        self.link.start(books.epoch, books.engine_id, now_ns)

    def _on_send(self, peer: bytes, data: bytes) -> None:
        _, seq, command = COMMANDS.decode(data)
        if isinstance(command, commands.DropWeights):
            self.last_operation = seq
        self.outgoing.append((peer, data))

    def want(self, now_ns: int) -> None:
        self.books.wishes += 1
        self.books.unsent.append(self.books.wishes)
        self._issue(now_ns)

    def turn(
        self, frames: list[tuple[bytes, bytes]], now_ns: int, log: str, engine_ended: bool
    ) -> bool:
        """One turn; `log` is ok, full, or where it crashes. False where it did.

        A restart folds what was logged; only what it led to was not said.
        """
        output = self.link.receive(frames, now_ns)
        if log == "crash before the log":
            return False
        said = len(self.outgoing)
        if output.inputs and log == "full":
            self.link.forget_unlogged(now_ns)
        elif output.inputs:
            self.link.note_logged()
            for report in output.inputs:
                self._handle(report, now_ns)
        if log == "crash behind the log":
            del self.outgoing[said:]
            return False
        if engine_ended or self.link.is_overdue(now_ns):
            self.link.lose(now_ns, ended=engine_ended)
            self._on_lost()
        self.link.tick(now_ns)
        return True

    def _handle(self, report: reports.LoggedReport, now_ns: int) -> None:
        if isinstance(report, reports.EngineInventory):
            if self.last_operation > report.answers:
                self.overtaken.append(report)
            self.link.open()
            self._on_inventory(report)
        else:
            self._on_report(report)
        self._issue(now_ns)

    def _on_report(self, report: reports.OperationReport) -> None:
        books = self.books
        books.inputs.append((self.link.engine_id, (books.epoch, books.losses), report.op))
        if report.op in books.open:
            wish = books.open.pop(report.op)
            books.done.append(wish)
            if wish % 3 == 0:
                # As a load is followed by a stage.
                books.wishes += 1
                books.unsent.append(books.wishes)

    def _on_inventory(self, report: reports.EngineInventory) -> None:
        books = self.books
        if books.engine_id not in ("", report.engine_id):
            self._on_lost()
        books.engine_id = report.engine_id
        books.next_op = max(books.next_op, report.last_op + 1)
        lost = [op for op in books.open if op not in report.running]
        books.lost.setdefault(report.engine_id, []).extend(lost)
        books.unsent += [books.open.pop(op) for op in lost]

    def _on_lost(self) -> None:
        self.books.losses += 1
        self.books.engine_id = ""
        self.books.unsent += list(self.books.open.values())
        self.books.open.clear()

    def _issue(self, now_ns: int) -> None:
        books = self.books
        if not books.engine_id:
            return
        while books.unsent:
            books.open[books.next_op] = books.unsent.pop(0)
            self.link.send(commands.DropWeights(books.next_op, 1), now_ns)
            books.next_op += 1


class Simulation:
    """A controller's lives, an engine's lives, and the lines between them."""

    def __init__(self) -> None:
        self.now_ns = 100 * SECOND_NS
        self.books = Books()
        self.controller: Controller | None = None
        self.engines: list[Engine] = []
        self.lines: list[Line] = []
        self._ended = False
        self.start_controller()
        self.start_engine()

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    @property
    def line(self) -> Line | None:
        return self.lines[-1] if self.lines else None

    def start_controller(self) -> None:
        if self.controller is None:
            self.controller = Controller(self.books, self.now_ns)
            self.reconnect(0, 0)

    def kill_controller(self, kept: int) -> None:
        """What the engine has received, it has: up to `kept` frames are still read by it."""
        self.controller = None
        for line in self.lines:
            line.is_up = False
            line.to_controller.clear()
            del line.to_engine[kept:]

    def start_engine(self) -> None:
        self.engines.append(Engine(len(self.engines)))
        for line in self.lines:
            line.to_engine.clear()
        self.reconnect(2, 0)

    def kill_engine(self) -> None:
        self._ended = self.controller is not None
        self.start_engine()

    def reconnect(self, to_controller: int, to_engine: int) -> None:
        """The line breaks: of each direction the first so many frames were through already."""
        for line in self.lines:
            line.is_up = False
            del line.to_controller[to_controller:]
            del line.to_engine[to_engine:]
        if self.controller is not None:
            self.lines.append(Line(f"line-{len(self.lines)}".encode()))

    def want(self) -> None:
        if self.controller is not None:
            self.controller.want(self.now_ns)
            self._transport()

    def controller_turn(self, count: int, log: str = "ok") -> None:
        """It reads up to `count` frames, of old lines first: those were there before."""
        if self.controller is None:
            return
        frames: list[tuple[bytes, bytes]] = []
        for line in self.lines:
            while line.to_controller and len(frames) < count:
                frames.append((line.name, line.to_controller.pop(0)))
        ended, self._ended = self._ended, False
        lives = self.controller.turn(frames, self.now_ns, log, ended)
        self._transport()
        if not lives:
            self.kill_controller(1_000)

    def _transport(self) -> None:
        """A router's: what is for a line that is gone, is gone."""
        assert self.controller is not None
        by_name = {line.name: line for line in self.lines if line.is_up}
        for peer, data in self.controller.outgoing:
            if peer in by_name:
                by_name[peer].to_engine.append(data)
        self.controller.outgoing.clear()

    def engine_turn(self, newest_first: bool, count: int, works: bool, beat: bool) -> None:
        """It reads fairly from all its lines, which may mean the newest one first."""
        read = 0
        for line in reversed(self.lines) if newest_first else self.lines:
            while line.to_engine and read < count:
                self.engine.take(line.to_engine.pop(0))
                read += 1
        if works:
            self.engine.work(count)
        self.engine.speak(self.line, beat)

    def settle(self) -> None:
        """Nothing is lost any more: after a while nothing is left to do."""
        self.start_controller()
        for _ in range(60):
            self.now_ns += SECOND_NS // 2
            for _ in range(3):
                self.engine_turn(False, 1_000, True, True)
                self.controller_turn(1_000)
