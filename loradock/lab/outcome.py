"""What a run did: loads, waits, tokens and fairness, measured alike in a log and a simulation."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from loradock.controller.core.controller import Controller

_SECOND_NS: Final = 1_000_000_000


class Percentiles(Struct, frozen=True):
    """Percentiles of durations in seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of a run.

    `loads` counts reads of adapter files, `load_bytes` what they read, `load_s` the time of all
    loads, stagings and writes of slots. A wait is the time from an inference's arrival to its
    start. `fairness` is Jain's index of the rates at which adapters were served: 1 if all requests
    were as fast, 1 / n if the requests of one of n adapters were served alone. What prefetches
    were good for (`PrefetchMeter`) is known of simulations alone.
    """

    policy: str
    requests: int
    served: int
    refused: int
    loads: int
    load_bytes: int
    activations: int
    evictions: int
    load_s: float
    wait_s: Percentiles
    first_token_s: Percentiles
    output_tokens: int
    tokens_per_s: float
    fairness: float
    duration_s: float
    digest: str
    prefetches: int = 0
    prefetches_useful: int = 0
    prefetches_useless: int = 0
    prefetches_harmful: int = 0


class _Request(Struct):
    adapter: str
    arrived_ns: int
    started_ns: int = -1
    first_token_ns: int = -1


class Meter:
    """Measures one run, from what happens to its requests."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._waits_ns: list[int] = []
        self._first_tokens_ns: list[int] = []
        self._rates: defaultdict[str, list[float]] = defaultdict(list)
        self._first_ns = self._last_ns = -1
        self._arrived = self._tokens = 0
        self.load_bytes = 0

    def arrive(self, request_id: str, adapter: str, time_ns: int) -> None:
        """Record the arrival of an inference; its repetitions are ignored."""
        if request_id not in self._requests:
            self._arrived += 1
            self._requests[request_id] = _Request(adapter, time_ns)
            self._first_ns = time_ns if self._first_ns < 0 else self._first_ns

    def start(self, request_id: str, time_ns: int) -> None:
        """Record that the engine was sent the inference."""
        request = self._requests[request_id]
        if request.started_ns < 0:
            request.started_ns = time_ns
            self._waits_ns.append(time_ns - request.arrived_ns)

    def begin_tokens(self, request_id: str, time_ns: int) -> None:
        """Record the time of the first token."""
        request = self._requests[request_id]
        if request.first_token_ns < 0:
            request.first_token_ns = time_ns
            self._first_tokens_ns.append(time_ns - request.arrived_ns)

    def end(self, request_id: str, time_ns: int, tokens: int) -> None:
        """Record the end of an inference."""
        request = self._requests[request_id]
        self._tokens += tokens
        self._last_ns = max(self._last_ns, time_ns)
        if tokens:
            self._rates[request.adapter].append(tokens / max(1, time_ns - request.arrived_ns))

    def outcome(self, controller: Controller) -> Outcome:
        """Return the result; the controller is that of the run."""
        totals = controller.world.totals
        duration_s = max(0, self._last_ns - self._first_ns) / _SECOND_NS
        moved_ns = totals.load_ns + totals.stage_ns + totals.write_ns
        return Outcome(
            policy=controller.policy_name,
            requests=self._arrived,
            served=totals.served,
            refused=controller.world.refused,
            loads=totals.loads,
            load_bytes=self.load_bytes,
            activations=totals.activations,
            evictions=totals.evictions,
            load_s=moved_ns / _SECOND_NS,
            wait_s=percentiles(self._waits_ns),
            first_token_s=percentiles(self._first_tokens_ns),
            output_tokens=self._tokens,
            tokens_per_s=self._tokens / duration_s if duration_s else 0.0,
            fairness=jain([sum(rates) / len(rates) for rates in self._rates.values()]),
            duration_s=duration_s,
            digest=controller.digest(),
            prefetches=totals.prefetches,
        )


def percentiles(durations_ns: Sequence[int]) -> Percentiles:
    """Return the percentiles of durations: each is a value that occurred."""
    ordered = sorted(durations_ns)
    if not ordered:
        return Percentiles()
    found = [ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)]
    return Percentiles(*(value / _SECOND_NS for value in found))


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index; 1 for no values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
