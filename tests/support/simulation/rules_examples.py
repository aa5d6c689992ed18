"""Small deployments for the tests of single rules: names, sizes and a few verbs.

What it is: a simulation with contents of ten bytes each unless told otherwise. What it is not: an
oracle of its own; the simulation's all hold here too. One rule: nothing moves unless a test says
`settle`.
"""

from typing import Any

import msgspec

from controller.core.limits import Limits
from controller.core.world import Adapter
from messages import commands, records, requests
from messages.errors import ErrorCode
from tests.support.simulation.engine import Content
from tests.support.simulation.world import Simulation

NAMES = ("a", "b", "c", "d", "e")
ROOMY = {"host_bytes_max": 10_000, "pinned_bytes_max": 10_000, "device_bytes_max": 10_000}


class Bench(Simulation):
    """One deployment with an engine; `slots` and other limits by name."""

    def __init__(self, slots: int = 2, *, engine: bool = True, **limits: int) -> None:
        self.asked = 0
        bounds = {"slots_max": slots, "host_adapters_max": 5, **ROOMY, **limits}
        files = {name: Content(f"content of {name}", 10, 10) for name in NAMES}
        super().__init__(Limits(**bounds), files)
        if engine:
            self.start_engine()
            self.settle()

    def settle(self, rounds: int = 40) -> None:
        """Let everything under way go on, inference excepted, without time passing."""
        for _ in range(rounds):
            self.transmit(len(self.channel))
            if self.engine is not None:
                for op in self.engine.completable():
                    command = self.engine.running[op].command
                    if not isinstance(command, commands.StartInference):
                        self.engine.complete(op)
            self.deliver(100)

    def ask(self, kind: type, *fields: Any, **named: Any) -> str:
        """Ask something under a fresh id, which is returned."""
        self.asked += 1
        request_id = f"r{self.asked}"
        self.handle(kind(request_id, *fields, **named))
        return request_id

    def get(self, kind: type, *fields: Any, **named: Any) -> Any:
        """Ask, settle, and return the reply (None where it still waits)."""
        request_id = self.ask(kind, *fields, **named)
        self.settle()
        return self.memory.replies.get(request_id)

    def reply(self, request_id: str) -> Any:
        """The answer that a request has got so far, None while it waits."""
        return self.memory.replies.get(request_id)

    def activate(self, *names: str) -> None:
        """Bring adapters into slots, in this order."""
        for name in names:
            assert isinstance(self.get(requests.ActivateAdapter, name), requests.AdapterDone)

    def generate(self, name: str | None) -> str:
        """Start a generation and leave it running."""
        request_id = self.ask(records.GenerationRequested, name)
        self.settle()
        return request_id

    def pool(self, name: str | None, task: requests.PoolingTask = "embed") -> str:
        """Start an embedding or a classification and leave it running."""
        request_id = self.ask(records.PoolingRequested, name, task)
        self.settle()
        return request_id

    def end_generation(self, request_id: str, code: ErrorCode | None = None) -> None:
        """Let the engine end a running generation, and what follows from it."""
        assert self.engine is not None
        self.engine.complete(self.world.waiting[request_id].op, code)
        self.settle()

    def finish(self, name: str) -> None:
        """Let the engine end what it does with one adapter, and nothing else."""
        assert self.engine is not None
        self.transmit(len(self.channel))
        self.engine.complete(self.adapter(name).op)
        self.deliver(100)

    def fail(self, kind: str, code: ErrorCode) -> None:
        """Let the engine fail the one running operation of a kind."""
        assert self.engine is not None
        self.transmit(len(self.channel))
        running = self.engine.running.items()
        (op,) = [op for op, job in running if type(job.command).__name__ == kind]
        self.engine.complete(op, code)
        self.deliver(100)

    def adapter(self, name: str) -> Adapter:
        """The current version under a name."""
        adapter = self.world.current(name)
        assert adapter is not None, f"{name} is not known"
        return adapter  # type: ignore[no-any-return]

    def state(self, name: str) -> str:
        """Where the current version is."""
        return self.adapter(name).state

    def in_slots(self) -> set[str]:
        """The names in slots."""
        return {a.name for a in self.world.adapters.values() if a.state == "gpu-slot"}

    def facts(self) -> dict[str, Any]:
        """Everything that a refusal must leave as it was."""
        world = self.world
        under_way = (list(world.operations.items()), list(world.waiting.items()))
        return {
            "adapters": world.adapters.digest_from_scratch(),
            "slots": world.slots.digest_from_scratch(),
            "under way": msgspec.msgpack.encode(under_way),
            "names": dict(world.names),
            "tiers": {tier: (used.count, used.size_bytes) for tier, used in world.tiers.items()},
            "queues": {tier: list(line) for tier, line in world.queues.lines.items()},
            "batches": (list(world.batches), world.driven),
            "wishes": (list(world.held), list(world.leaving), list(world.striving)),
            "order": {state: list(order) for state, order in world.recency.items()},
            "numbers": (world.next_op, world.next_adapter_id, world.next_generation),
        }

    def refused(self, code: ErrorCode, parts: tuple[str, ...], kind: type, *fields: Any) -> None:
        """Ask what is refused at once, with this code and these words, and changes nothing."""
        before, published = self.facts(), self.world.events_seq
        reply = self.reply(self.ask(kind, *fields))
        assert isinstance(reply, requests.Refused), f"{kind.__name__}{fields} got {reply}"
        assert reply.code is code, reply.message
        for part in parts:
            assert part in reply.message, f"{part!r} is not in {reply.message!r}"
        assert (self.facts(), self.world.events_seq) == (before, published)
