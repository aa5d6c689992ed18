"""Simulated docks in front of a rule that chooses among them: activations, shares and latencies.

Time is simulated. A dock serves `parallel` requests at once, each for `service_s`; an adapter that
is in no slot is loaded by one worker, and evicts the least recently used idle one. Load reports
arrive every `status_s`, as those of a server do.
"""

import bisect
import heapq
import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from loradock.fleet.catalogue import WantedAdapter
from loradock.fleet.picker import Load, Picker, Seen

LOAD_S: Final = 0.08
STAGE_S: Final = 0.01
WRITE_S: Final = 0.01
STATUS_S: Final = 0.25
SERVICE_S: Final = 0.04
SLOTS: Final = 4
PARALLEL: Final = 4

Choose = Callable[[str, float], int]


@dataclass
class Traffic:
    """Requests at random times, with adapters by Zipf's law; `hot`: an adapter's extra share."""

    requests: int
    rate: float
    adapters: int = 24
    exponent: float = 1.0
    hot: float = 0.0

    def __call__(self, seed: int) -> Iterator[tuple[float, str]]:
        """Yield times and names."""
        generator = random.Random(seed)  # noqa: S311 - traffic, no secrets
        weights = [1 / (rank + 1) ** self.exponent for rank in range(self.adapters)]
        names = [f"adapter-{number}" for number in range(self.adapters)]
        generator.shuffle(names)
        now = 0.0
        for _ in range(self.requests):
            now += generator.expovariate(self.rate)
            if generator.random() < self.hot:
                yield now, names[0]
            else:
                yield now, generator.choices(names, weights)[0]


@dataclass
class Dock:
    """A simulated dock."""

    name: str
    slots: int
    parallel: int
    service_s: float
    now: float = 0.0
    in_slots: OrderedDict[str, int] = field(default_factory=OrderedDict)  # name -> leases
    cached: set[str] = field(default_factory=set)
    running: int = 0
    served: int = 0
    activations: int = 0
    loading: str = ""
    waiting: deque[tuple[float, str]] = field(default_factory=deque)

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return self.running + len(self.waiting)


class Simulation:
    """Docks, a rule and the events between them."""

    def __init__(self, docks: list[Dock], picker: Picker | None = None) -> None:
        self.docks = docks
        self.picker = picker
        self.latencies: list[float] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, happen: Callable[[float], None]) -> None:
        """Plan an event."""
        heapq.heappush(self._events, (time, next(self._count), happen))

    def run(self, arrivals: Iterator[tuple[float, str]], choose: Choose) -> float:
        """Run to the end; return when the last request ended."""
        now = 0.0
        if self.picker:
            self._report(0.0)
        for now, name in arrivals:
            self._until(now)
            dock = self.docks[choose(name, now)]
            dock.served += 1
            dock.waiting.append((now, name))
            self._serve(dock, now)
        while any(dock.requests for dock in self.docks):
            now = self._step()
        return now

    def _until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            self._step()

    def _step(self) -> float:
        time, _, happen = heapq.heappop(self._events)
        happen(time)
        return time

    def _report(self, now: float) -> None:
        for dock in self.docks:
            load = Load(
                dock.requests, dock.slots, dock.service_s / dock.parallel, LOAD_S, STAGE_S, WRITE_S
            )
            self.picker.on_load(dock.name, load, now)  # type: ignore[union-attr]
        self.at(now + STATUS_S, self._report)

    def _tell(self, dock: Dock, name: str, state: str) -> None:
        if self.picker:
            self.picker.on_adapter(dock.name, name, Seen(state))

    def _serve(self, dock: Dock, now: float) -> None:
        """Start what can run, in order of arrival, and the load of what waits the longest."""
        left: deque[tuple[float, str]] = deque()
        for came, name in dock.waiting:
            if name in dock.in_slots and dock.running < dock.parallel:
                dock.running += 1
                dock.in_slots[name] += 1
                dock.in_slots.move_to_end(name)
                self.at(now + dock.service_s, self._ended(dock, came, name))
                continue
            left.append((came, name))
            if name not in dock.in_slots and not dock.loading:
                self._load(dock, name, now)
        dock.waiting = left

    def _load(self, dock: Dock, name: str, now: float) -> None:
        if len(dock.in_slots) >= dock.slots:
            victim = next((one for one, leases in dock.in_slots.items() if not leases), None)
            if victim is None:
                return
            del dock.in_slots[victim]
            self._tell(dock, victim, "cpu-cached")
        dock.loading = name
        dock.activations += 1
        time = STAGE_S + WRITE_S + (0 if name in dock.cached else LOAD_S)
        dock.cached.add(name)

        def loaded(now: float) -> None:
            dock.loading = ""
            dock.in_slots[name] = 0
            self._tell(dock, name, "gpu-slot")
            self._serve(dock, now)

        self.at(now + time, loaded)

    def _ended(self, dock: Dock, came: float, name: str) -> Callable[[float], None]:
        def ended(now: float) -> None:
            self.latencies.append(now - came)
            dock.running -= 1
            dock.in_slots[name] -= 1
            self._serve(dock, now)

        return ended


@dataclass
class Result:
    """What a rule made of a traffic; `seconds`: until the last request ended."""

    activations: int
    busiest: float
    p99_s: float
    seconds: float


def simulate(rule: str, traffic: Traffic, seed: int = 0, docks: int = 3) -> Result:
    """Return what a rule (`picker`, `round-robin`, `hashing`) makes of a traffic."""
    made = [Dock(f"dock-{number}", SLOTS, PARALLEL, SERVICE_S) for number in range(docks)]
    picker = Picker() if rule == "picker" else None
    simulation = Simulation(made, picker)
    choose: Choose
    if picker:
        numbers = {dock.name: number for number, dock in enumerate(made)}
        picker.set_docks(dict.fromkeys(numbers, SLOTS))
        names = {name for _, name in traffic(seed)}
        picker.set_wanted({name: WantedAdapter(name) for name in names})

        def choose(name: str, now: float) -> int:
            return numbers[picker.pick(name, now).docks[0]]
    elif rule == "hashing":
        ring = _ring(made)

        def choose(name: str, _: float) -> int:
            return ring[bisect.bisect(ring, (_hash(name), 0)) % len(ring)][1]
    else:
        turn = itertools.cycle(range(len(made)))

        def choose(_: str, __: float) -> int:
            return next(turn)

    seconds = simulation.run(traffic(seed), choose)
    served = Counter({dock.name: dock.served for dock in made})
    ordered = sorted(simulation.latencies)
    return Result(
        sum(dock.activations for dock in made),
        max(served.values()) / served.total(),
        ordered[int(len(ordered) * 0.99)],
        seconds,
    )


def _ring(docks: list[Dock], points: int = 100) -> list[tuple[int, int]]:
    """Return a ring of consistent hashing with points per dock."""
    return sorted(
        (_hash(f"{dock.name}#{point}"), number)
        for number, dock in enumerate(docks)
        for point in range(points)
    )


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
