"""Random histories: client requests, changing files, and engines that start and die.

Each move has plain numbers and names as arguments, so that Hypothesis and a seeded generator choose
them alike. A move that is impossible at the moment does nothing.
"""

import random
from dataclasses import replace
from typing import Any

from loradock.controller.core.limits import Limits
from loradock.messages import commands, records, requests
from loradock.messages.errors import ErrorCode
from tests.support.simulation.deployment import Deployment
from tests.support.simulation.engine_records import Content, EngineAdapter, RunningOperation

NAMES = ("a", "b", "c", "d", "e")
PATHS = (*NAMES, "a-new", "b-new", "missing")
WARNINGS = {"a": ("layer 1 has no tensors", "a file is not used"), "b-new": ("a file is not used",)}
CODES = (
    ErrorCode.DEVICE_OUT_OF_MEMORY,
    ErrorCode.NOT_FINITE,
    ErrorCode.NOT_FOUND,
    ErrorCode.CONFLICT,
)
TIMEOUTS = (0, 0, 0, 5, 200)
PAUSES = (1, 10, 300, 1_100_000)

Sizes = list[tuple[int, int]]
"""The bytes of each of `PATHS`, as read and as packed."""


def small_limits(
    slots: int,
    more_on_host: int,
    budgets: tuple[int, int, int],
    tokens: int = 0,
) -> Limits:
    """Return limits that are reached soon, with timeouts that are reached only by a move."""
    host, pinned, device = budgets
    return Limits(
        max_loras=slots,
        max_cpu_loras=slots + more_on_host,
        host_bytes_max=host,
        pinned_bytes_max=pinned,
        device_bytes_max=device,
        request_timeout_ms=3_000_000,
        generation_timeout_ms=3_000_000,
        operation_timeout_ms=1_000_000,
        retry_backoff_ms=1,
        turn_tokens=tokens,
    )


class Workload:
    """A deployment and the moves that can be made in it."""

    def __init__(self, limits: Limits, sizes: Sizes, policy: str = "lru") -> None:
        self.files = {
            path: Content(f"content of {path}", *size, warnings=WARNINGS.get(path, ()))
            for path, size in zip(PATHS, sizes, strict=True)
            if path != "missing"
        }
        self.request_count = 0
        self.sent: list[Any] = []
        self.deployment = Deployment(limits, self.files, policy)
        self.deployment.start_engine()

    def send(self, kind: type, *fields: Any) -> None:
        """Send a new request."""
        self.request_count += 1
        message = kind(f"r{self.request_count}", *fields)
        self.sent.append(message)
        self.deployment.handle(message)

    def cancel(self, number: int) -> None:
        """Cancel some request of any kind."""
        self.send(requests.CancelGeneration, f"r{1 + number % (self.request_count + 1)}")

    def send_again(self, number: int) -> None:
        """Send some request a second time."""
        if self.sent:
            self.deployment.handle(self.sent[number % len(self.sent)])

    def repeat_report(self, number: int) -> None:
        """Deliver some unacknowledged report a second time."""
        reports = self.deployment.unacknowledged
        if reports:
            self.deployment.handle(reports[number % len(reports)])

    def complete(self, number: int, count: int) -> None:
        """End some of the engine's operations with success."""
        for _ in range(count):
            self.deployment.complete(number)

    def advance_all(self, rounds: int) -> None:
        """Advance everything in flight by some steps."""
        for _ in range(rounds):
            self.deployment.transmit(100)
            self.deployment.complete(0)
            self.deployment.deliver(100)

    def take_turns(self, rounds: int) -> None:
        """Let everything but inference advance, and the turns of adapters in slots end."""
        for _ in range(rounds):
            self.deployment.transmit(100)
            self.deployment.complete_moves()
            self.deployment.deliver(100)
            self.deployment.advance(2)

    def change_file(self, path: str) -> None:
        """Replace a path's content by other bytes of the same sizes."""
        old = self.files[path]
        self.files[path] = replace(old, fingerprint=old.fingerprint + "'")

    def lose_engine(self, silently: bool) -> None:
        """Kill the engine."""
        if self.deployment.engine is not None:
            self.deployment.lose_engine(silently=silently)

    def start_engine(self) -> None:
        """Start a new engine."""
        if self.deployment.engine is None:
            self.deployment.start_engine()

    def start_foreign_engine(self, ids: list[int], path: str, is_running: bool) -> None:
        """Start an engine with adapters of another log: its ids mean other content."""
        if self.deployment.engine is not None:
            return
        content = self.files[path]
        adapters = {
            number: EngineAdapter(number, path, path, content, "gpu-slot", True, slot, slot + 3)
            for slot, number in enumerate(ids[: self.deployment.limits.max_loras])
        }
        running = {}
        if is_running:
            place = adapters[ids[0]]
            start = commands.StartGeneration(9, "foreign", ids[0], place.slot, place.generation)
            running[9] = RunningOperation(start, content)
        generations = {entry.generation for entry in adapters.values()}
        self.deployment.start_engine(
            adapters=adapters, running=running, seen={3, 9}, generations_seen=generations
        )


def random_history(seed: int, steps: int) -> Workload:
    """Return the history of a seed, which is the same in every process."""
    rng = random.Random(seed)
    budgets = (rng.randrange(60, 240, 10), rng.randrange(60, 140, 10), rng.randrange(60, 200, 10))
    sizes = [(rng.randrange(10, 60, 10), rng.randrange(10, 60, 10)) for _ in PATHS]
    limits = small_limits(rng.randint(1, 3), rng.randint(1, 3), budgets, 8 * (seed % 3 > 0))
    workload = Workload(limits, sizes)
    for _ in range(steps):
        rng.choice(_MOVES)(workload, rng)
    workload.deployment.run_dry()
    return workload


def _send(kind: type, *fields: Any) -> Any:
    """Return a move that sends a `kind`; from a tuple among its fields one value is chosen."""

    def move(workload: Workload, rng: random.Random) -> None:
        chosen = [rng.choice(field) if isinstance(field, tuple) else field for field in fields]
        workload.send(kind, *chosen)

    return move


_FLAGS = (False, True)
TARGETS = ("cpu-cached", "pinned", "gpu-slot", "gpu-slot")
_MOVES = (
    _send(requests.LoadAdapter, NAMES, ("", "", *PATHS), _FLAGS, TIMEOUTS),
    _send(requests.StageAdapter, NAMES, "", TIMEOUTS),
    *(_send(requests.ActivateAdapter, NAMES, "", TIMEOUTS),) * 3,
    _send(requests.HoldAdapter, NAMES, "", TIMEOUTS),
    *(_send(requests.ReleaseAdapter, NAMES),) * 2,
    _send(requests.PrefetchAdapter, NAMES, "", TARGETS),
    _send(requests.DeactivateAdapter, NAMES, TIMEOUTS),
    _send(requests.EvictAdapter, NAMES, TIMEOUTS),
    _send(requests.RemoveAdapter, NAMES, _FLAGS, TIMEOUTS),
    *(_send(records.GenerationRequested, (*NAMES, None), TIMEOUTS),) * 3,
    _send(records.PoolingRequested, (*NAMES, None), ("embed", "classify"), TIMEOUTS),
    lambda c, r: c.send(requests.ActivateBatch, tuple(r.choices(NAMES, k=r.randint(1, 3))), 0),
    lambda c, r: c.cancel(r.randrange(1000)),
    lambda c, r: c.send_again(r.randrange(1000)),
    lambda c, r: c.repeat_report(r.randrange(1000)),
    lambda c, r: c.deployment.transmit(r.randint(1, 6)),
    lambda c, r: c.complete(r.randrange(6), r.randint(1, 4)),
    lambda c, r: c.deployment.complete(r.randrange(6), r.choice(CODES)),
    lambda c, r: c.deployment.deliver(r.randint(1, 6)),
    *(lambda c, r: c.advance_all(r.randint(1, 8)),) * 6,
    *(lambda c, r: c.take_turns(r.randint(1, 8)),) * 3,
    lambda c, r: c.deployment.unacknowledged.clear(),
    lambda c, r: c.deployment.advance(r.choice(PAUSES)),
    lambda c, r: c.change_file(r.choice(NAMES)),
    lambda c, r: c.lose_engine(r.choice(_FLAGS)),
    *(lambda c, r: c.start_engine(),) * 2,
    lambda c, r: c.start_foreign_engine(r.sample(range(1, 9), 2), r.choice(NAMES), True),
    lambda c, r: c.deployment.cut_link(r.randrange(4)),
    lambda c, r: c.deployment.restart_controller(r.choice((0, 0, 0, 4))),
)
