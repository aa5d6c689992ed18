"""A controller, an engine and the link between them, with oracles over all that they say.

What it is: one simulated deployment in one process; time, loss, order and failure are the test's.
What it is not: the shell; the link here is the least that a real one promises (in order, nothing
sent while an inventory is awaited). One rule: what a reply, a command or an event claims is held
against records that the simulation keeps for itself.
"""

from typing import Any

import msgspec

from controller.core.actions import Action, Command, Publish, Reply, SetTimer
from controller.core.controller import Controller
from controller.core.limits import Limits
from messages import commands, records, reports
from messages.errors import ErrorCode
from tests.support.simulation.engine import Files, SimulatedEngine
from tests.support.simulation.memory import Memory

MS = 1_000_000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(records.Record)


class Simulation:
    """One deployment."""

    def __init__(self, limits: Limits, files: Files) -> None:
        self.limits = limits
        self.files = files
        self.now = 1_000 * MS
        self.inputs: list[bytes] = []
        self.controller = Controller(limits, checked=True)
        self.shadow = Controller(limits)
        self.memory = Memory(self.controller.world)
        self.engine: SimulatedEngine | None = None
        self.engines = 0
        self.channel: list[Any] = []
        self.unacknowledged: list[Any] = []
        self.synced = False
        self.asks = 0
        self.prompts: set[str] = set()
        self.pending: list[Any] = []
        self.timer_ns = 0
        self.epoch = 0
        self.start_controller()

    @property
    def world(self) -> Any:
        """The controller's world; for looking only."""
        return self.controller.world

    # The controller's side.

    def start_controller(self) -> None:
        """Begin a life of the controller on what its log adds up to."""
        self.epoch += 1
        self.prompts.clear()
        self.channel.clear()
        self.pending.clear()
        self.timer_ns = 0
        self.handle(records.ControllerStarted(self.epoch))
        self.ask_inventory()

    def restart_controller(self, lost_inputs: int = 0) -> None:
        """Kill it and fold its log, of which the last `lost_inputs` never reached the disk."""
        before, digest = self.memory, self.controller.digest()
        kept = len(self.inputs) - min(lost_inputs, len(self.inputs) - 1)
        inputs, self.inputs = self.inputs[:kept], []
        self.controller, self.shadow = (
            Controller(self.limits, checked=True),
            Controller(self.limits),
        )
        self.memory = Memory(self.controller.world)
        for record in inputs:
            self._take(record, replaying=True)
        for request_id, reply in self.memory.replies.items():
            assert before.replies[request_id] == reply, "a fold answers differently"
        if not lost_inputs:
            assert self.controller.digest() == digest, "a fold gives another world"
            assert self.memory.states == before.states
        if self.engine is not None:
            # What it was not told is in the log, it sends again.
            self.engine.outbox[:0] = self.unacknowledged
            self.engine.outbox = [
                report
                for report in self.engine.outbox
                if not isinstance(report, reports.EngineInventory)
            ]
        self.unacknowledged = []
        self.start_controller()

    def handle(self, message: Any) -> None:
        """Log one input, handle it, act on it, and on what follows in the same life."""
        self.now += 1
        self._take(_encoder.encode(records.Record(self.now, message)), replaying=False)
        while self.pending:
            self.now += 1
            lost = self.pending.pop(0)
            self._take(_encoder.encode(records.Record(self.now, lost)), replaying=False)

    def _take(self, record: bytes, *, replaying: bool) -> None:
        self.inputs.append(record)
        message, now = _decoder.decode(record).input, _decoder.decode(record).time_ns
        self.memory.on_input(message)
        if isinstance(message, records.InferenceRequested):
            self.prompts.add(message.request_id)
        actions = self.controller.handle(message, now)
        self.shadow.handle(_decoder.decode(record).input, now)
        assert self.controller.digest() == self.shadow.digest(), "the fold gives another world"
        for action in actions:
            self._perform(action, replaying)
        self.memory.check()
        if not replaying:
            self._check_timer()

    def _perform(self, action: Action, replaying: bool) -> None:
        match action:
            case Reply(message=reply):
                self.memory.on_reply(reply)
            case Publish(message=published):
                self.memory.on_event(published)
            case SetTimer(at_ns=at_ns):
                assert at_ns > 0
                self.timer_ns = at_ns
            case Command(message=command):
                self._on_command(command, replaying)

    # Oracles.

    def _on_command(self, command: Any, replaying: bool) -> None:
        self.memory.on_command(command)
        if replaying:
            return
        if isinstance(command, commands.RequestInventory):
            self.ask_inventory()
        elif isinstance(command, commands.StartInference) and (
            command.request_id not in self.prompts
        ):
            self.pending.append(records.PayloadLost(command.request_id))
        elif self.synced and self.engine is not None:
            self.channel.append(command)

    def _check_timer(self) -> None:
        """Somebody wakes the controller before anybody has waited too long."""
        deadlines = [w.deadline_ns for w in self.world.waiting.values() if not w.told]
        deadlines += [
            operation.deadline_ns
            for operation in self.world.operations.values()
            if operation.deadline_ns and not operation.overdue
        ]
        if deadlines:
            assert 0 < self.timer_ns <= min(deadlines), f"timer {self.timer_ns}, {min(deadlines)}"

    def _check_facts(self) -> None:
        """Where the engine has told everything, the world says what the engine holds."""
        engine, world = self.engine, self.world
        if engine is None or not self.synced or not world.ready or engine.outbox:
            return
        told = {a: (h.state, h.slot, h.generation) for a, h in engine.held.items()}
        known = {}
        for adapter in world.adapters.values():
            if adapter.state in ("cpu-cached", "pinned", "gpu-slot"):
                in_slot = adapter.state == "gpu-slot"
                place = (adapter.slot, adapter.generation) if in_slot else (-1, 0)
                known[adapter.id] = (adapter.state, *place)
        assert known == told, f"the world says {known}, the engine {told}"
        for adapter_id, held in engine.held.items():
            adapter = world.adapters[adapter_id]
            assert adapter.name == held.name
            assert adapter.fingerprint == held.content.fingerprint

    # The link and the engine.

    def ask_inventory(self) -> None:
        """Send no command until the engine has answered this."""
        self.synced = False
        self.asks += 1
        if self.engine is not None:
            self.channel.append(commands.RequestInventory(self.asks))

    def start_engine(self, **held: Any) -> SimulatedEngine:
        """A new engine comes and is asked what it holds."""
        self.engines += 1
        self.engine = SimulatedEngine(
            f"engine-{self.engines}",
            self.limits,
            self.files,
            self.limits.slots_max,
            self.limits.device_bytes_max,
            **held,
        )
        self.channel.clear()
        self.unacknowledged.clear()
        self.ask_inventory()
        return self.engine

    def lose_engine(self, *, silently: bool = False) -> None:
        """The engine dies; `silently`, nobody notices before the next one is there."""
        assert self.engine is not None
        lost = records.EngineLost(self.engine.engine_id, "it was killed")
        self.engine = None
        self.synced = False
        self.channel.clear()
        self.unacknowledged.clear()
        if not silently:
            self.handle(lost)

    def transmit(self, count: int) -> None:
        """Let the engine receive the next commands."""
        for _ in range(min(count, len(self.channel))):
            command = self.channel.pop(0)
            assert self.engine is not None
            op = getattr(command, "op", 0)
            if op in self.memory.bound and op not in self.engine.seen:
                for slot, generation, fingerprint in self.memory.bound[op]:
                    held = self.engine.in_slot(slot, generation)
                    assert held.content.fingerprint == fingerprint, f"{command} meets {held}"
            self.engine.receive(command)

    def complete(self, choice: int, code: ErrorCode | None = None) -> None:
        """Let one of the engine's operations end, if there are any."""
        completable = [] if self.engine is None else self.engine.completable()
        if self.engine is not None and completable:
            self.engine.complete(completable[choice % len(completable)], code)

    def deliver(self, count: int) -> None:
        """Bring the next reports to the controller, as one group."""
        if self.engine is None:
            return
        frames, self.engine.outbox = self.engine.outbox[:count], self.engine.outbox[count:]
        group = []
        for frame in frames:
            if not isinstance(frame, reports.EngineInventory):
                self.unacknowledged.append(frame)
                group.append(frame)
            elif not self.synced and frame.answers == self.asks:
                self.synced = True
                group.append(frame)
            elif self.synced:
                self.ask_inventory()
        for report in group:
            self.handle(report)
        self._check_facts()

    def cut_link(self, lost: int) -> None:
        """Lose the last commands on their way, notice the gap, and ask."""
        del self.channel[max(0, len(self.channel) - lost) :]
        self.ask_inventory()

    def advance(self, milliseconds: int) -> None:
        """Let time pass, and the timer fire if it is due."""
        self.now += milliseconds * MS
        while 0 < self.timer_ns <= self.now:
            self.timer_ns = 0
            self.handle(records.TimerFired())

    # The end.

    def run_dry(self) -> None:
        """Without further failures everybody is answered, and then nothing moves any more."""
        world = self.world
        rounds = 60 + 30 * (len(world.waiting) + len(world.adapters))
        for _ in range(rounds):
            if self.engine is None:
                self.start_engine()
            resting = any(adapter.resting for adapter in world.adapters.values())
            if not self._round() and not world.waiting and not world.leaving:
                self._check_at_rest()
                return
            if world.waiting or (world.leaving and resting):
                # Rests end; nobody's patience does.
                self.advance(self.limits.rest_ms)
        raise AssertionError(f"after {rounds} rounds {world.waiting} wait, {world.operations} run")

    def _check_at_rest(self) -> None:
        """Old versions and strangers are gone, and nothing is kept for anybody."""
        world = self.world
        assert not any(adapter.retired for adapter in world.adapters.values())
        assert not any(adapter.leases for adapter in world.adapters.values())
        assert not world.operations
        assert not world.queues.members
        self._check_facts()

    def _round(self) -> bool:
        """Everything that is under way goes one step; whether there was anything."""
        engine = self.engine
        assert engine is not None
        busy = bool(self.channel or engine.running or engine.outbox)
        self.transmit(len(self.channel))
        for _ in range(len(engine.running)):
            self.complete(0)
        self.deliver(len(engine.outbox))
        return busy
