"""A controller, an engine and the link between them in one process, with oracles over all of them.

The test decides about time, loss, order and failure. The link promises no more than a real one: it
keeps the order, and sends nothing while it waits for an inventory. Every reply, command and event
is compared with records that are kept apart from the controller.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from loradock.controller.core.actions import (
    Action,
    PublishEvent,
    RestartEngine,
    SendCommand,
    SendReply,
)
from loradock.controller.core.context import Checked
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES, Policy
from loradock.controller.core.limits import Limits
from loradock.controller.core.rankings import Accepts, Fifo, Ranking
from loradock.controller.core.requests import REQUESTS, Pending
from loradock.controller.core.world import Adapter
from loradock.messages import commands, records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import AdapterId
from tests.support.simulation.engine import Files, SimulatedEngine
from tests.support.simulation.oracle import Oracle

MS = 1_000_000


def choose_unknown(candidates: Iterator[Adapter]) -> Adapter | None:
    """Return an adapter that is no candidate, if there is any."""
    return None if next(candidates, None) is None else Adapter(1, "other", "other")


def raise_error(_candidates: Iterator[Adapter]) -> Adapter | None:
    """Raise."""
    raise KeyError("a policy's own")


class WrongRanking(Fifo):
    """Chooses what it must not."""

    def choose(self, accepts: Accepts) -> AdapterId | None:
        """Return the first adapter, accepted or not."""
        return next(iter(self), super().choose(accepts))


class RaisingRanking(Fifo):
    """Raises at the first use of an adapter that it has."""

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Raise."""
        super().use(adapter_id, size_bytes, cost_ns)
        if adapter_id in self:
            raise ValueError


FAILING_POLICIES: dict[str, Policy | type[Ranking]] = {
    "unknown": choose_unknown,
    "raises": raise_error,
    "wrong-ranking": WrongRanking,
    "raising-ranking": RaisingRanking,
}
"""Policies that `lru` replaces."""

TESTED_POLICIES = {**POLICIES, **FAILING_POLICIES}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(records.Record)


class Deployment:
    """A simulated controller with its log and engine."""

    def __init__(self, limits: Limits, files: Files, policy: str = "lru") -> None:
        self.limits = limits
        self.policy = policy
        self.files = files
        self.now = 1_000 * MS
        self.inputs: list[bytes] = []
        self.controller = self.new_controller(checked=True)
        self.shadow = self.new_controller()
        self.oracle = Oracle(self.controller.world)
        self.engine: SimulatedEngine | None = None
        self.engines = 0
        self.channel: list[Any] = []
        self.unacknowledged: list[Any] = []
        self.synced = False
        self.inventory_requests = 0
        self.prompts: set[str] = set()
        self.followups: list[Any] = []
        self.epoch = 0
        self.start_controller()

    @property
    def world(self) -> Any:
        """The controller's world, for reading only."""
        return self.controller.world

    # The controller's side.

    def new_controller(self, *, checked: bool = False) -> Controller:
        """Return a controller of this deployment, without its inputs."""
        return Controller(self.limits, self.policy, checked=checked, policies=TESTED_POLICIES)

    def start_controller(self) -> None:
        """Start the controller on the world that results from its log."""
        self.epoch += 1
        self.prompts.clear()
        self.channel.clear()
        self.followups.clear()
        self.handle(records.ControllerStarted(self.epoch))
        self.request_inventory()

    def restart_controller(self, lost_inputs: int = 0) -> None:
        """Kill the controller and replay its log, without the last `lost_inputs` inputs."""
        before, digest = self.oracle, self.controller.digest()
        kept = len(self.inputs) - min(lost_inputs, len(self.inputs) - 1)
        inputs, self.inputs = self.inputs[:kept], []
        self.controller, self.shadow = (
            self.new_controller(checked=True),
            self.new_controller(),
        )
        self.oracle = Oracle(self.controller.world)
        for record in inputs:
            self._take(record, replaying=True)
        for request_id, reply in self.oracle.replies.items():
            assert before.replies[request_id] == reply, "a replay answers differently"
        if not lost_inputs:
            assert self.controller.digest() == digest, "a replay leads to another world"
            assert self.oracle.states == before.states
        if self.engine is not None:
            # The engine sends again every report that was not acknowledged.
            self.engine.outbox[:0] = self.unacknowledged
            self.engine.outbox = [
                report
                for report in self.engine.outbox
                if not isinstance(report, reports.EngineInventory)
            ]
        self.unacknowledged = []
        self.start_controller()

    def handle(self, message: Any) -> None:
        """Log and handle an input, perform its actions, and handle the inputs that they cause."""
        self.now += 1
        self._take(_encoder.encode(records.Record(self.now, message)), replaying=False)
        while self.followups:
            self.now += 1
            followup = self.followups.pop(0)
            self._take(_encoder.encode(records.Record(self.now, followup)), replaying=False)

    def _take(self, record: bytes, *, replaying: bool) -> None:
        self.inputs.append(record)
        message, now = _decoder.decode(record).input, _decoder.decode(record).time_ns
        self.oracle.on_input(message)
        if isinstance(message, records.InferenceRequested):
            self.prompts.add(message.request_id)
        found = self._check_request(message)
        checked = found if isinstance(found, Checked) else None
        actions = self.controller.handle(message, now, checked=checked)
        if found is not None and checked is None:
            expected = [] if isinstance(found, Pending) else [SendReply(found)]
            assert actions == expected
        # It has no earlier check, as a replay, and must do the same.
        self.shadow.handle(_decoder.decode(record).input, now)
        assert self.controller.digest() == self.shadow.digest(), "a second controller differs"
        for action in actions:
            self._perform(action, replaying)
        self.oracle.check()
        if not replaying:
            self._check_timer()

    def _check_request(self, message: Any) -> requests.Reply | Pending | Checked | None:
        """Return the check of a request before it is handled, which must change nothing."""
        if not isinstance(message, REQUESTS):
            return None
        found = self.controller.check(message, 0)  # type: ignore[arg-type]
        assert self.controller.digest() == self.shadow.digest(), "the check changed the state"
        return found

    def _perform(self, action: Action, replaying: bool) -> None:
        match action:
            case SendReply(message=reply):
                self.oracle.on_reply(reply)
            case PublishEvent(message=published):
                self.oracle.on_event(published)
            case SendCommand(message=command):
                self._on_command(command, replaying)
            case RestartEngine(engine_id=engine_id):
                if not replaying and self.engine and self.engine.engine_id == engine_id:
                    self._end_engine()

    # Oracles.

    def _on_command(self, command: Any, replaying: bool) -> None:
        self.oracle.on_command(command)
        if replaying:
            return
        if isinstance(command, commands.RequestInventory):
            self.request_inventory()
        elif isinstance(command, commands.StartInference) and (
            command.request_id not in self.prompts
        ):
            self.followups.append(records.PayloadLost(command.request_id))
        elif self.synced and self.engine is not None:
            self.channel.append(command)

    def _check_timer(self) -> None:
        """Check that the timer is set to the earliest deadline or before it."""
        deadlines = [w.deadline_ns for w in self.world.pending_requests.values() if not w.answered]
        deadlines += [
            operation.deadline_ns
            for operation in self.world.operations.values()
            if operation.deadline_ns
        ]
        if deadlines:
            timer_ns = self.world.timer_ns
            assert 0 < timer_ns <= min(deadlines), f"timer {timer_ns}, {min(deadlines)}"

    def _check_states(self) -> None:
        """Check that the world equals the engine's adapters where every report was delivered."""
        engine, world = self.engine, self.world
        if engine is None or not self.synced or not world.engine_ready or engine.outbox:
            return
        held = {a: (h.state, h.slot, h.generation) for a, h in engine.adapters.items()}
        known = {}
        for adapter in world.adapters.values():
            if adapter.state in ("cpu-cached", "pinned", "gpu-slot"):
                in_slot = adapter.state == "gpu-slot"
                place = (adapter.slot, adapter.generation) if in_slot else (-1, 0)
                known[adapter.id] = (adapter.state, *place)
        assert known == held, f"the world has {known}, the engine {held}"
        for adapter_id, loaded in engine.adapters.items():
            adapter = world.adapters[adapter_id]
            assert adapter.name == loaded.name
            assert adapter.fingerprint == loaded.content.fingerprint
            assert world.warnings.get(adapter_id, ()) == loaded.content.warnings

    # The link and the engine.

    def request_inventory(self) -> None:
        """Request the inventory; no command is sent before its answer."""
        self.synced = False
        self.inventory_requests += 1
        if self.engine is not None:
            self.channel.append(commands.RequestInventory(self.inventory_requests))

    def start_engine(self, **contents: Any) -> SimulatedEngine:
        """Start a new engine, empty or with `contents`, and request its inventory."""
        self.engines += 1
        self.engine = SimulatedEngine(
            f"engine-{self.engines}",
            self.limits,
            self.files,
            self.limits.max_loras,
            self.limits.device_bytes_max,
            **contents,
        )
        self.channel.clear()
        self.unacknowledged.clear()
        self.request_inventory()
        return self.engine

    def lose_engine(self, *, silently: bool = False) -> None:
        """Kill the engine; `silently`: the controller does not notice before the next one."""
        assert self.engine is not None
        lost = records.EngineLost(self.engine.engine_id, "it was killed")
        self._end_engine()
        if not silently:
            self.handle(lost)

    def _end_engine(self) -> None:
        self.engine = None
        self.synced = False
        self.channel.clear()
        self.unacknowledged.clear()

    def transmit(self, count: int) -> None:
        """Deliver the next commands to the engine."""
        for _ in range(min(count, len(self.channel))):
            command = self.channel.pop(0)
            assert self.engine is not None
            op = getattr(command, "op", 0)
            if op in self.oracle.bound and op not in self.engine.seen:
                for slot, generation, fingerprint in self.oracle.bound[op]:
                    adapter = self.engine.in_slot(slot, generation)
                    assert adapter.content.fingerprint == fingerprint, f"{command} meets {adapter}"
            self.engine.receive(command)

    def complete(self, choice: int, code: ErrorCode | None = None) -> None:
        """End one of the engine's operations, if there are any."""
        completable = [] if self.engine is None else self.engine.completable()
        if self.engine is not None and completable:
            self.engine.complete(completable[choice % len(completable)], code)

    def complete_moves(self) -> None:
        """End everything that may end but inference."""
        if self.engine is not None:
            for op in self.engine.completable():
                if not isinstance(self.engine.running[op].command, commands.StartInference):
                    self.engine.complete(op)

    def deliver(self, count: int) -> None:
        """Deliver the next reports to the controller, as one group."""
        if self.engine is None:
            return
        frames, self.engine.outbox = self.engine.outbox[:count], self.engine.outbox[count:]
        group, answered = [], self.synced
        for frame in frames:
            if not isinstance(frame, reports.EngineInventory):
                self.unacknowledged.append(frame)
                group.append(frame)
            elif not answered and frame.answers == self.inventory_requests:
                answered = True
                group.append(frame)
            elif answered:
                answered = False
                self.request_inventory()
        for report in group:
            # As on the link, no command is sent before the inventory is handled: those that the
            # reports before it cause were not meant for an engine that may be another one.
            if isinstance(report, reports.EngineInventory):
                self.synced = answered
            self.handle(report)
        self._check_states()

    def cut_link(self, lost: int) -> None:
        """Lose the last commands in flight and request the inventory."""
        del self.channel[max(0, len(self.channel) - lost) :]
        self.request_inventory()

    def advance(self, milliseconds: int) -> None:
        """Let time pass, and the timer fire when it is reached."""
        self.now += milliseconds * MS
        while 0 < self.world.timer_ns <= self.now:
            self.handle(records.TimerFired())

    # The end.

    def run_dry(self) -> None:
        """Run without failures until every request is answered and nothing moves any more."""
        world = self.world
        rounds = 60 + 30 * (len(world.pending_requests) + len(world.adapters))
        for _ in range(rounds):
            if self.engine is None:
                self.start_engine()
            self._release_slots()
            backing_off = any(adapter.backing_off for adapter in world.adapters.values())
            if not self._round() and not world.pending_requests and not world.demoting:
                self._check_at_rest()
                return
            if world.pending_requests or (world.demoting and backing_off):
                # Long enough to end backoffs, too short for the requests' deadlines.
                self.advance(self.limits.retry_backoff_ms)
        raise AssertionError(
            f"after {rounds} rounds {world.pending_requests} wait, {world.operations} run"
        )

    def _release_slots(self) -> None:
        """Release held adapters where suspended generations wait for their slots."""
        pending = self.world.pending_requests
        waiting = [a for a in self.world.adapters.values() if a.backing_off]
        if any(pending[request_id].op for adapter in waiting for request_id in adapter.waiters):
            for adapter_id in tuple(self.world.held):
                name = self.world.adapters[adapter_id].name
                self.handle(requests.ReleaseAdapter(f"dry-{self.now}", name))

    def _check_at_rest(self) -> None:
        """Check that replaced and unknown versions are removed and nothing is reserved."""
        world = self.world
        assert not any(adapter.retired for adapter in world.adapters.values())
        assert not any(adapter.leases for adapter in world.adapters.values())
        assert not world.operations
        assert not world.queues.members
        self._check_states()

    def _round(self) -> bool:
        """Advance everything in flight by one step; returns whether there was anything."""
        engine = self.engine
        assert engine is not None
        busy = bool(self.channel or engine.running or engine.outbox)
        self.transmit(len(self.channel))
        for _ in range(len(engine.running)):
            self.complete(0)
        self.deliver(len(engine.outbox))
        return busy
