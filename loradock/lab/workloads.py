"""Workloads: requests for adapters, generated or after public traces.

A generated workload is a function of its seed. Its adapters have ranks from 8 to 128 and the size
that a rank has for a model of 8 billion parameters; a load takes a fixed time and a time per byte.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from math import pi, sin
from typing import Final

from msgspec import Struct

from loradock.controller.core.limits import Limits
from loradock.lab.service import Line, Service, Step
from loradock.lab.traces import SHIPPED, TracedRequest, shipped_trace
from loradock.lab.traffic import Arrival, Facts, Traffic, Work
from loradock.messages import records, reports, requests

RANKS: Final = (8, 16, 32, 64, 128)
BYTES_PER_RANK: Final = 5_242_880
"""All linear layers of Llama 3 8B in bfloat16: 84 MB with rank 16."""

LOAD_FIXED_NS: Final = 30_000_000
LOAD_BYTE_NS: Final = 1.0
"""A load takes 30 ms to open, check and stage, and reads 1 GB a second."""

RATE: Final = 10.0
"""Requests per second of the generated workloads."""

_SECOND_NS: Final = 1_000_000_000
_INTRODUCTION_NS: Final = 2 * _SECOND_NS
"""Each adapter is loaded once before the requests, one after the other."""

_BURST: Final = 3
_BURST_GAP_S: Final = 0.2

_SESSION_S: Final = 60.0
_SESSION_TOKENS: Final = 2

_STEP: Final = Step(
    prompt_fixed_ns=5e6, prompt_token_ns=5e4, fixed_ns=15e6, row_ns=1e5, adapter_ns=2e5, rank_ns=2e3
)


class Request(Struct, frozen=True, gc=False):
    """One request: its arrival in seconds from the start, the adapter's number, its size."""

    time_s: float
    adapter: int
    work: Work


class Workload(Struct, frozen=True):
    """Requests for adapters in the order of arrival; `ranks` has the adapters by number."""

    name: str
    ranks: tuple[int, ...]
    requests: list[Request]

    def size_bytes(self, adapter: int) -> int:
        """Return the size of an adapter in memory and in its file."""
        return self.ranks[adapter] * BYTES_PER_RANK

    def load_ns(self, adapter: int) -> int:
        """Return how long a load of an adapter takes."""
        return LOAD_FIXED_NS + int(self.size_bytes(adapter) * LOAD_BYTE_NS)

    def capacity_bytes(self, share: float) -> int:
        """Return a share of the bytes of all adapters, at least those of the largest."""
        total = sum(self.ranks) * BYTES_PER_RANK
        return max(int(share * total), max(self.ranks) * BYTES_PER_RANK)

    def traffic(self, share: float, host_share: float = 0.0) -> Traffic:
        """Return what a simulation of a server needs, whose device has a share of the bytes.

        Every adapter is known from the start. Memory is bounded by bytes alone. Without a
        `host_share`, an adapter that leaves its slot leaves memory: its return is a load.
        """
        capacity = self.capacity_bytes(share)
        host = self.capacity_bytes(host_share) if host_share else 0
        largest = max(self.ranks) * BYTES_PER_RANK
        limits = Limits(
            max_loras=len(self.ranks),
            max_cpu_loras=len(self.ranks),
            host_bytes_max=max(host, 2 * largest),
            pinned_bytes_max=max(host, capacity),
            device_bytes_max=capacity,
        )
        return Traffic(
            limits=limits,
            policy="lru",
            inventory=reports.EngineInventory(
                "lab", 1, "lab", limits.max_loras, limits.device_bytes_max
            ),
            arrivals=list(self._arrivals()),
            files={_path(a): self._facts(a) for a in range(len(self.ranks))},
            works={f"r{number}": one.work for number, one in enumerate(self.requests)},
            service=_SERVICE,
        )

    def _facts(self, adapter: int) -> Facts:
        size_bytes = self.size_bytes(adapter)
        return Facts(f"{adapter:032x}", self.ranks[adapter], size_bytes, size_bytes)

    def _arrivals(self) -> Iterator[Arrival]:
        for adapter in range(len(self.ranks)):
            name = f"a{adapter}"
            load = requests.LoadAdapter(f"load-{name}", name, _path(adapter))
            yield Arrival(1 + adapter * _INTRODUCTION_NS, load)
        start_ns = (1 + len(self.ranks)) * _INTRODUCTION_NS
        for number, one in enumerate(self.requests):
            message = records.GenerationRequested(f"r{number}", f"a{one.adapter}")
            yield Arrival(start_ns + int(one.time_s * _SECOND_NS), message)


def _path(adapter: int) -> str:
    return f"/lab/a{adapter}"


_SERVICE: Final = Service(
    {
        "LoadWeights": Line(float(LOAD_FIXED_NS), LOAD_BYTE_NS),
        "StageWeights": Line(1e6, 0.1),
        "WriteSlot": Line(1e6, 0.04),
        "ResetSlot": Line(1e5),
    },
    _STEP,
)


def _weights(count: int) -> list[float]:
    """Return the cumulative weights of Zipf's law with exponent 1."""
    return list(accumulate(1 / (1 + place) for place in range(count)))


def _zipf(rng: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Popularity after Zipf's law, exponent 1; independent requests in a Poisson process."""
    weights, time_s = _weights(count), 0.0
    while True:
        time_s += rng.expovariate(RATE)
        yield time_s, rng.choices(range(count), cum_weights=weights)[0]


def _drift(rng: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Zipf, and with every 250 requests the least popular adapter becomes the most popular."""
    for number, (time_s, place) in enumerate(_zipf(rng, count)):
        yield time_s, (place - number // 250) % count


def _diurnal(rng: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Days of 400 s: the rate varies by 80 %, and half of the adapters are used at night."""
    weights, time_s = _weights(count // 2), 0.0
    while True:
        day = sin(2 * pi * time_s / 400)
        time_s += rng.expovariate(RATE * (1 + 0.8 * day))
        half = rng.random() < (1 + day) / 2
        yield time_s, 2 * rng.choices(range(count // 2), cum_weights=weights)[0] + half


def _flash(rng: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Zipf, and of every 1,000 requests, half of the first 300 are for one that was rare."""
    crowded = 0
    for number, (time_s, place) in enumerate(_zipf(rng, count)):
        if number % 1000 == 0:
            crowded = rng.randrange(count // 2, count)
        is_crowd = number % 1000 < 300 and rng.random() < 0.5
        yield time_s, crowded if is_crowd else place


def _scan(rng: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Zipf, and every third request is for the next of all adapters in a cycle."""
    for number, (time_s, place) in enumerate(_zipf(rng, count)):
        yield time_s, number // 3 % count if number % 3 == 0 else place


def _jobs(rng: random.Random, count: int) -> Iterator[tuple[float, int]]:
    """Each adapter has three requests every one, two or five minutes, give or take 2 %."""
    periods_s = [rng.choice((60.0, 120.0, 300.0)) for _ in range(count)]
    # (time, adapter, requests sent of this burst)
    due = [(rng.uniform(0, period_s), place, 0) for place, period_s in enumerate(periods_s)]
    heapify(due)
    while True:
        time_s, place, sent = heappop(due)
        yield time_s, place
        if sent < _BURST - 1:
            heappush(due, (time_s + _BURST_GAP_S, place, sent + 1))
        else:
            heappush(due, (time_s + periods_s[place] * rng.gauss(1, 0.02), place, 0))


GENERATED: Final[dict[str, Callable[[random.Random, int], Iterator[tuple[float, int]]]]] = {
    "zipf": _zipf,
    "drift": _drift,
    "diurnal": _diurnal,
    "flash": _flash,
    "scan": _scan,
    "jobs": _jobs,
}
"""The generated workloads: from a generator and the number of adapters, times and adapters."""

NAMES: Final = (*GENERATED, *SHIPPED)
"""The workloads that need no file."""


def make_workload(name: str, adapters: int = 200, count: int = 10_000, seed: int = 0) -> Workload:
    """Return a workload by its name; one seed is one workload. Raises `KeyError`."""
    if name in SHIPPED:
        return from_trace(name, shipped_trace(name), adapters, count, seed)
    rng = random.Random(f"{seed} {name}")  # noqa: S311 - a simulation
    ranks = _ranks(rng, adapters)
    # Popularity must not follow the numbers, which `_ranks` and `traffic` go through in order.
    order = rng.sample(range(adapters), adapters)
    drawn = islice(GENERATED[name](rng, adapters), count)
    found = [Request(time_s, order[place], _work(rng)) for time_s, place in drawn]
    return Workload(name, ranks, found)


def from_trace(
    name: str, traced: Sequence[TracedRequest], adapters: int, count: int, seed: int = 0
) -> Workload:
    """Return a workload with the times and sizes of a trace, which is repeated up to `count`.

    A client is an adapter. Without clients, an adapter is drawn after Zipf's law for each session.
    Without sessions, a request continues the session whose last prompt was up to two tokens shorter
    or longer, at most a minute ago.
    """
    rng = random.Random(f"{seed} {name}")  # noqa: S311 - a simulation
    clients = {one.client for one in traced} - {""}
    total = len(clients) or adapters
    chooser = _Sessions(rng, total)
    ranks = _ranks(rng, total)
    length_s = traced[-1].time_s + 1 / RATE
    found = []
    for number in range(count):
        turn, place = divmod(number, len(traced))
        one = traced[place]
        time_s = turn * length_s + one.time_s
        adapter = chooser.adapter_of(one, time_s, turn)
        found.append(Request(time_s, adapter, Work(one.prompt_tokens, one.output_tokens)))
    return Workload(name, ranks, found)


class _Sessions:
    """Chooses the adapters of a trace's requests."""

    def __init__(self, rng: random.Random, adapters: int) -> None:
        self._rng, self._order = rng, rng.sample(range(adapters), adapters)
        self._weights = _weights(adapters)
        self._named: dict[str, int] = {}
        # By the repetition and the length of the last prompt, when it was and the adapter.
        self._recent: dict[tuple[int, int], tuple[float, int]] = {}

    def adapter_of(self, request: TracedRequest, time_s: float, turn: int) -> int:
        """Return the adapter of a request; `turn` counts the repetitions of the trace."""
        if request.client:
            return self._named.setdefault(request.client, len(self._named))
        if request.session:
            key = f"{turn} {request.session}"
            if key not in self._named:
                self._named[key] = self._draw()
            return self._named[key]
        return self._continued(turn, request.prompt_tokens, time_s)

    def _continued(self, turn: int, tokens: int, time_s: float) -> int:
        near = range(tokens - _SESSION_TOKENS, tokens + _SESSION_TOKENS + 1)
        seen = [self._recent[turn, length] for length in near if (turn, length) in self._recent]
        last_s, adapter = max(seen, default=(-_SESSION_S, 0))
        if time_s - last_s >= _SESSION_S:
            adapter = self._draw()
        self._recent[turn, tokens] = time_s, adapter
        return adapter

    def _draw(self) -> int:
        return self._rng.choices(self._order, cum_weights=self._weights)[0]


def _ranks(rng: random.Random, adapters: int) -> tuple[int, ...]:
    return tuple(rng.choices(RANKS, k=adapters))


def _work(rng: random.Random) -> Work:
    """Return the size of a generated request: medians of 300 and 60 tokens, long tails."""
    return Work(1 + int(rng.lognormvariate(5.7, 0.8)), 1 + int(rng.lognormvariate(4.1, 0.7)))
