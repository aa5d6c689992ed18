"""Whoever makes a history: clients, files that change, engines that come and go.

What it is: the moves of which histories are made, each of plain numbers and names, so that
hypothesis and a seeded generator can choose them alike. What it is not: an oracle; `Simulation`
has those. One rule: a move that is not possible now does nothing.
"""

import random
from typing import Any

from controller.core.limits import Limits
from messages import commands, records, requests
from messages.errors import ErrorCode
from tests.support.simulation.engine import Content, Held, Job
from tests.support.simulation.world import Simulation

NAMES = ("a", "b", "c", "d", "e")
PATHS = (*NAMES, "a-new", "b-new", "missing")
CODES = (
    ErrorCode.DEVICE_OUT_OF_MEMORY,
    ErrorCode.NOT_FINITE,
    ErrorCode.NOT_FOUND,
    ErrorCode.CONFLICT,
)
TIMEOUTS = (0, 0, 0, 5, 200)
PAUSES = (1, 10, 300, 1_100_000)

Sizes = list[tuple[int, int]]
"""What each of `PATHS` takes, as it is read and as it is packed."""


def small_limits(slots: int, more_on_host: int, budgets: tuple[int, int, int]) -> Limits:
    """Limits that bind soon, with patience that does not end by itself."""
    host, pinned, device = budgets
    return Limits(
        slots_max=slots,
        host_adapters_max=slots + more_on_host,
        host_bytes_max=host,
        pinned_bytes_max=pinned,
        device_bytes_max=device,
        request_timeout_ms=3_000_000,
        generation_timeout_ms=3_000_000,
        operation_timeout_ms=1_000_000,
        rest_ms=1,
    )


class Clients:
    """One history's makers."""

    def __init__(self, limits: Limits, sizes: Sizes) -> None:
        self.files = {
            path: Content(f"content of {path}", *size)
            for path, size in zip(PATHS, sizes, strict=True)
            if path != "missing"
        }
        self.asked = 0
        self.sent: list[Any] = []
        self.sim = Simulation(limits, self.files)
        self.sim.start_engine()

    def ask(self, kind: type, *fields: Any) -> None:
        """A fresh request."""
        self.asked += 1
        message = kind(f"r{self.asked}", *fields)
        self.sent.append(message)
        self.sim.handle(message)

    def cancel(self, number: int) -> None:
        """Cancel some request, whatever it was."""
        self.ask(requests.CancelGeneration, f"r{1 + number % (self.asked + 1)}")

    def ask_again(self, number: int) -> None:
        """Some request comes a second time."""
        if self.sent:
            self.sim.handle(self.sent[number % len(self.sent)])

    def report_again(self, number: int) -> None:
        """Some report that was not acknowledged comes a second time."""
        kept = self.sim.unacknowledged
        if kept:
            self.sim.handle(kept[number % len(kept)])

    def complete(self, number: int, count: int) -> None:
        """Some of the engine's operations end well."""
        for _ in range(count):
            self.sim.complete(number)

    def go_on(self, rounds: int) -> None:
        """Everything under way goes some steps on."""
        for _ in range(rounds):
            self.sim.transmit(100)
            self.sim.complete(0)
            self.sim.deliver(100)

    def change_file(self, path: str) -> None:
        """Other bytes of the same sizes lie under a path."""
        old = self.files[path]
        self.files[path] = Content(old.fingerprint + "'", old.load_bytes, old.blob_bytes)

    def lose_engine(self, silently: bool) -> None:
        """The engine dies."""
        if self.sim.engine is not None:
            self.sim.lose_engine(silently=silently)

    def start_engine(self) -> None:
        """A new engine comes."""
        if self.sim.engine is None:
            self.sim.start_engine()

    def start_foreign_engine(self, ids: list[int], path: str, is_running: bool) -> None:
        """Somebody else's engine comes: its numbers mean other things than ours."""
        if self.sim.engine is not None:
            return
        content = self.files[path]
        held = {
            number: Held(number, path, path, content, "gpu-slot", True, slot, slot + 3)
            for slot, number in enumerate(ids[: self.sim.limits.slots_max])
        }
        running = {}
        if is_running:
            place = held[ids[0]]
            start = commands.StartGeneration(9, "foreign", ids[0], place.slot, place.generation)
            running[9] = Job(start, content)
        generations = {entry.generation for entry in held.values()}
        self.sim.start_engine(held=held, running=running, seen={3, 9}, generations_seen=generations)


def random_history(seed: int, steps: int) -> Clients:
    """The history that a seed stands for; the same in every process."""
    rng = random.Random(seed)
    budgets = (rng.randrange(60, 240, 10), rng.randrange(60, 140, 10), rng.randrange(60, 200, 10))
    sizes = [(rng.randrange(10, 60, 10), rng.randrange(10, 60, 10)) for _ in PATHS]
    clients = Clients(small_limits(rng.randint(1, 3), rng.randint(1, 3), budgets), sizes)
    for _ in range(steps):
        rng.choice(_MOVES)(clients, rng)
    clients.sim.run_dry()
    return clients


def _ask(kind: type, *fields: Any) -> Any:
    """A move that asks for `kind`; a tuple among its fields is chosen from."""

    def move(clients: Clients, rng: random.Random) -> None:
        chosen = [rng.choice(field) if isinstance(field, tuple) else field for field in fields]
        clients.ask(kind, *chosen)

    return move


_FLAGS = (False, True)
_MOVES = (
    _ask(requests.LoadAdapter, NAMES, ("", "", *PATHS), _FLAGS, TIMEOUTS),
    _ask(requests.StageAdapter, NAMES, "", TIMEOUTS),
    *(_ask(requests.ActivateAdapter, NAMES, "", TIMEOUTS),) * 3,
    _ask(requests.HoldAdapter, NAMES, "", TIMEOUTS),
    *(_ask(requests.ReleaseAdapter, NAMES),) * 2,
    _ask(requests.DeactivateAdapter, NAMES, TIMEOUTS),
    _ask(requests.EvictAdapter, NAMES, TIMEOUTS),
    _ask(requests.RemoveAdapter, NAMES, _FLAGS, TIMEOUTS),
    *(_ask(records.GenerationRequested, (*NAMES, None), TIMEOUTS),) * 3,
    _ask(records.PoolingRequested, (*NAMES, None), ("embed", "classify"), TIMEOUTS),
    lambda c, r: c.ask(requests.ActivateBatch, tuple(r.choices(NAMES, k=r.randint(1, 3))), 0),
    lambda c, r: c.cancel(r.randrange(1000)),
    lambda c, r: c.ask_again(r.randrange(1000)),
    lambda c, r: c.report_again(r.randrange(1000)),
    lambda c, r: c.sim.transmit(r.randint(1, 6)),
    lambda c, r: c.complete(r.randrange(6), r.randint(1, 4)),
    lambda c, r: c.sim.complete(r.randrange(6), r.choice(CODES)),
    lambda c, r: c.sim.deliver(r.randint(1, 6)),
    *(lambda c, r: c.go_on(r.randint(1, 8)),) * 6,
    lambda c, r: c.sim.unacknowledged.clear(),
    lambda c, r: c.sim.advance(r.choice(PAUSES)),
    lambda c, r: c.change_file(r.choice(NAMES)),
    lambda c, r: c.lose_engine(r.choice(_FLAGS)),
    *(lambda c, r: c.start_engine(),) * 2,
    lambda c, r: c.start_foreign_engine(r.sample(range(1, 9), 2), r.choice(NAMES), True),
    lambda c, r: c.sim.cut_link(r.randrange(4)),
    lambda c, r: c.sim.restart_controller(r.choice((0, 0, 0, 4))),
)
