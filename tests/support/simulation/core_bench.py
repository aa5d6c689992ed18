"""A small deployment for the tests of single rules.

Each adapter's content has ten bytes unless the test changes it. Nothing moves until the test lets
the engine receive, complete and report.
"""

from typing import Any

import msgspec

from loradock.controller.core.limits import Limits
from loradock.controller.core.world import Adapter
from loradock.messages import commands, events, records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.views import PoolingTask
from tests.support.simulation.deployment import Deployment
from tests.support.simulation.engine_records import Content

NAMES = ("a", "b", "c", "d", "e")
AMPLE_BUDGETS = {"host_bytes_max": 10_000, "pinned_bytes_max": 10_000, "device_bytes_max": 10_000}


class CoreBench(Deployment):
    """A deployment with an engine; further limits are given by name."""

    def __init__(
        self, slots: int = 2, *, engine: bool = True, policy: str = "lru", **limits: int
    ) -> None:
        self.request_count = 0
        bounds = {"max_loras": slots, "max_cpu_loras": 5, **AMPLE_BUDGETS, **limits}
        files = {name: Content(f"content of {name}", 10, 10) for name in NAMES}
        super().__init__(Limits(**bounds), files, policy)
        if engine:
            self.start_engine()
            self.settle()

    def settle(self, rounds: int = 40) -> None:
        """Complete everything in flight except inference and turns, without time passing."""
        for _ in range(rounds):
            self.transmit(len(self.channel))
            self.complete_moves()
            self.deliver(100)

    def complete_moves(self) -> None:
        """End everything that may end but inference, and the turns of slots that inference uses."""
        if self.engine is None:
            return
        running = self.engine.running
        used = {
            (work.command.slot, work.command.generation)
            for work in running.values()
            if isinstance(work.command, commands.StartInference) and not work.suspended
        }
        for op in self.engine.completable():
            command = running[op].command
            if isinstance(command, commands.PreemptSlot):
                may_end = (command.slot, command.generation) not in used
            else:
                may_end = not isinstance(command, commands.StartInference)
            if may_end:
                self.engine.complete(op)

    def end_turns(self) -> None:
        """End the turns of the adapters that are ordered to leave their slots, and settle."""
        self.settle()
        assert self.engine is not None
        for op, work in tuple(self.engine.running.items()):
            if isinstance(work.command, commands.PreemptSlot):
                self.engine.complete(op)
        self.settle()

    def send(self, kind: type, *fields: Any, **named: Any) -> str:
        """Send a request under a fresh id, which is returned."""
        self.request_count += 1
        request_id = f"r{self.request_count}"
        self.handle(kind(request_id, *fields, **named))
        return request_id

    def request(self, kind: type, *fields: Any, **named: Any) -> Any:
        """Send a request, settle, and return the reply; None while it waits."""
        request_id = self.send(kind, *fields, **named)
        self.settle()
        return self.reply(request_id)

    def reply(self, request_id: str) -> Any:
        """Return the reply to a request so far, None while it waits."""
        return self.oracle.replies.get(request_id)

    def activate(self, *names: str) -> None:
        """Activate adapters in this order."""
        for name in names:
            reply = self.request(requests.ActivateAdapter, name)
            assert isinstance(reply, requests.AdapterDone)

    def generate(self, name: str | None) -> str:
        """Start a generation and leave it running; returns its request id."""
        request_id = self.send(records.GenerationRequested, name)
        self.settle()
        return request_id

    def pool(self, name: str | None, task: PoolingTask = "embed") -> str:
        """Start an embedding or a classification and leave it running; returns its request id."""
        request_id = self.send(records.PoolingRequested, name, task)
        self.settle()
        return request_id

    def end_generation(self, request_id: str, code: ErrorCode | None = None) -> None:
        """Let the engine end a running inference, and settle."""
        assert self.engine is not None
        self.engine.complete(self.world.pending_requests[request_id].op, code)
        self.settle()

    def finish(self, name: str) -> None:
        """Let the engine end the operation of one adapter, and nothing else."""
        assert self.engine is not None
        self.transmit(len(self.channel))
        self.engine.complete(self.adapter(name).op)
        self.deliver(100)

    def fail(self, kind: str, code: ErrorCode) -> None:
        """Let the engine fail the one running operation of a kind."""
        assert self.engine is not None
        self.transmit(len(self.channel))
        running = self.engine.running.items()
        (op,) = [op for op, work in running if type(work.command).__name__ == kind]
        self.engine.complete(op, code)
        self.deliver(100)

    def adapter(self, name: str) -> Adapter:
        """Return the current version under a name."""
        adapter = self.world.current(name)
        assert adapter is not None, f"{name} is not known"
        return adapter  # type: ignore[no-any-return]

    def state(self, name: str) -> str:
        """Return the state of the current version."""
        return self.adapter(name).state

    def in_slots(self) -> set[str]:
        """Return the names of the adapters in slots."""
        return {a.name for a in self.world.adapters.values() if a.state == "gpu-slot"}

    def record_events(self) -> list[events.Event]:
        """Return a list to which every event from now on is appended."""
        recorded: list[events.Event] = []
        on_event = self.oracle.on_event

        def record(published: events.Published) -> None:
            recorded.append(published.event)
            on_event(published)

        self.oracle.on_event = record  # type: ignore[method-assign]
        return recorded

    def snapshot(self) -> dict[str, Any]:
        """Return all state that a refusal must leave unchanged."""
        world = self.world
        in_flight = (list(world.operations.items()), list(world.pending_requests.items()))
        return {
            "adapters": world.adapters.digest_from_scratch(),
            "slots": sorted(world.free_slots),
            "in flight": msgspec.msgpack.encode(in_flight),
            "names": dict(world.names),
            "tiers": {tier: (used.count, used.size_bytes) for tier, used in world.tiers.items()},
            "queues": {tier: list(queue) for tier, queue in world.queues.by_tier.items()},
            "batches": (list(world.batches), world.current_batch),
            "goals": (list(world.held), list(world.demoting), list(world.promoting)),
            "order": {state: list(order) for state, order in world.lru_order.items()},
            "numbers": (world.next_op, world.next_adapter_id, world.next_generation),
        }

    def refused(self, code: ErrorCode, parts: tuple[str, ...], kind: type, *fields: Any) -> None:
        """Send a request that is refused at once, with this code and text, and changes nothing."""
        before, published = self.snapshot(), self.world.events_seq
        reply = self.reply(self.send(kind, *fields))
        assert isinstance(reply, requests.Refused), f"{kind.__name__}{fields} got {reply}"
        assert reply.code is code, reply.message
        for part in parts:
            assert part in reply.message, f"{part!r} is not in {reply.message!r}"
        assert (self.snapshot(), self.world.events_seq) == (before, published)
