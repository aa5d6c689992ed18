"""The figures of the lab: policies against LRU and the bound, and simulations against a server.

`lru` is the default policy, so the figures of a policy are those of `adaptive` against it.
"""

import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from benchmarks.feed import CoreFeed
from benchmarks.figures import Figure, best_seconds
from benchmarks.lab_server import ADAPTERS as SERVED_ADAPTERS
from benchmarks.lab_server import SLOTS, ServedRun, served
from loradock.controller.core.limits import Limits
from loradock.controller.core.rankings import Lru
from loradock.lab.bounds import offline_bound
from loradock.lab.comparison import compare, run_cache
from loradock.lab.outcome import Outcome
from loradock.lab.simulator import Changes, simulate
from loradock.lab.workloads import GENERATED, NAMES, RANKS, Workload, make_workload
from loradock.messages import records, requests

POLICY: Final = "adaptive"
_SHARES: Final = (0.05, 0.1, 0.2, 0.4)
_SHARE: Final = 0.1
_HOST_SHARE: Final = 0.3
_HOUR_REQUESTS: Final = 36_000
_CHOICE_ADAPTERS: Final = 10_000
_CHOICE_OTHERS: Final = 1_000
_CHOICES: Final = 300
_SERVED_WORKLOADS: Final = ("zipf", "drift", "flash")
_SERVED_POLICIES: Final = ("lru", "gdsf", POLICY)
_SERVED_REQUESTS: Final = 200


def run() -> Iterator[Figure]:
    """Measure all figures."""
    yield _gap_closed()
    yield _never_worse()
    yield _prefetch()
    yield _speed()
    yield _choice()
    yield from _on_a_server()


def _gap_closed() -> Figure:
    rows = [row for name in NAMES for row in compare(make_workload(name), (POLICY,), _SHARE)]
    closed = {row.workload: row.gap_closed or 0.0 for row in rows}
    fourth = sorted(closed.values())[-4]
    shares = ", ".join(f"{name} {share:.2f}" for name, share in closed.items())
    return Figure(
        "lab.gap_closed",
        fourth,
        f"of the gap with {POLICY}, fourth best of {len(closed)} workloads",
        f"load time of LRU and the offline bound ({rows[0].bound}); {shares}",
        fourth,
        "ratio >= 0.5",
        fourth >= 0.5,
    )


def _never_worse() -> Figure:
    rows = [
        (row.of_lru, f"{name}, memory for {share:.0%}")
        for name in NAMES
        for share in _SHARES
        for row in compare(make_workload(name), (POLICY,), share)
    ]
    worst, where = max(rows)
    return Figure(
        "lab.never_worse",
        worst,
        f"of LRU's load time with {POLICY}",
        f"LRU; the worst of {len(rows)}: {where}",
        worst,
        "ratio <= 1.02",
        worst <= 1.02,
    )


def _prefetch() -> Figure:
    """Simulate a server with and without prefetches from history."""
    outcomes = {
        name: [
            simulate(make_workload(name).traffic(_SHARE, _HOST_SHARE), Changes(prefetch=prefetch))
            for prefetch in ("none", "history")
        ]
        for name in GENERATED
    }
    ratios = {
        name: changed.outcome.first_token_s.p95 / base.outcome.first_token_s.p95
        for name, (base, changed) in outcomes.items()
    }
    found = outcomes["jobs"][1].outcome
    others = max((ratio, name) for name, ratio in ratios.items() if name != "jobs")
    judged = (found.prefetches_useful, found.prefetches_useless, found.prefetches_harmful)
    return Figure(
        "lab.prefetch",
        1000 * found.first_token_s.p95,
        "ms to the first token (p95) of jobs with --prefetch-history",
        f"without: {1000 * outcomes['jobs'][0].outcome.first_token_s.p95:.0f} ms; "
        f"{judged[0]} useful, {judged[1]} useless, {judged[2]} harmful; "
        f"worst other workload {others[1]} ({others[0]:.3f})",
        ratios["jobs"],
        "jobs <= 0.8, others <= 1.05",
        ratios["jobs"] <= 0.8 and others[0] <= 1.05,
    )


def _speed() -> Figure:
    """Time the simulation of an hour under ten requests per second, with one load in two."""
    traffic = make_workload("zipf", count=_HOUR_REQUESTS).traffic(_SHARE)
    loads = simulate(traffic).outcome.loads
    taken_s = best_seconds(lambda: simulate(traffic), 2)
    return Figure(
        "lab.speed",
        taken_s,
        "s of processor time",
        f"an hour of {_HOUR_REQUESTS:,} requests and {loads:,} loads",
        taken_s / 3600,
        "<= 3 s",
        taken_s <= 3,
    )


def _choice() -> Figure:
    """Compare the core's time of a request in which one in two evicts one of 10,000 adapters."""
    ours_us, lru_us = (1e6 * _choice_s(policy) for policy in (POLICY, "lru"))
    ratio = ours_us / lru_us
    return Figure(
        "lab.choice",
        ours_us,
        f"us of processor time per request with {POLICY}",
        f"lru: {lru_us:.0f} us",
        ratio,
        "ratio <= 2",
        ratio <= 2,
    )


def _choice_s(policy: str) -> float:
    size_bytes = 1 << 40
    limits = Limits(
        max_loras=_CHOICE_ADAPTERS,
        max_cpu_loras=_CHOICE_ADAPTERS,
        host_bytes_max=size_bytes,
        pinned_bytes_max=size_bytes,
        device_bytes_max=size_bytes,
    )
    feed = CoreFeed(limits)
    feed.controller.reconfigure(limits, policy)
    known = _CHOICE_ADAPTERS + _CHOICE_OTHERS
    for number in range(known):
        feed.handle(requests.LoadAdapter(feed.request_id(), f"a{number}"))
    generator = random.Random(0)  # noqa: S311 - a measurement

    def generate(number: int) -> None:
        feed.handle(records.GenerationRequested(feed.request_id(), f"a{number}"))

    def work() -> None:
        for _ in range(_CHOICES // 2):
            generate(generator.randrange(_CHOICE_ADAPTERS))
            generate(generator.randrange(_CHOICE_ADAPTERS, known))

    for number in range(_CHOICE_ADAPTERS):
        generate(number)
    return best_seconds(work) / _CHOICES


def _on_a_server() -> Iterator[Figure]:
    """Serve each workload under each policy, and predict each run from the log of LRU's."""
    errors: dict[str, list[float]] = {name: [] for name in _ERRORS}
    for name in _SERVED_WORKLOADS:
        workload = make_workload(name, SERVED_ADAPTERS, _SERVED_REQUESTS)
        runs = {policy: served(workload, policy) for policy in _SERVED_POLICIES}
        if name == "zipf":
            yield _real(runs[POLICY], runs["lru"], workload)
        for policy, found in runs.items():
            predicted = simulate(runs["lru"].traffic, Changes(policy=policy)).outcome
            for error, of in _ERRORS.items():
                errors[error].append(abs(of(predicted) / of(found.logged) - 1))
    yield _error(errors)


_ERRORS: Final[dict[str, Callable[[Outcome], float]]] = {
    "loads": lambda outcome: float(outcome.loads),
    "throughput": lambda outcome: outcome.tokens_per_s,
    "wait p99": lambda outcome: outcome.wait_s.p99,
    "first token p50": lambda outcome: outcome.first_token_s.p50,
}
"""What is predicted. Each is of the server's log: a client sees first tokens later, by its way."""


def _real(ours: ServedRun, lru: ServedRun, workload: Workload) -> Figure:
    """Compare served runs; the floor is of the loads, of adapters that are all of one size."""
    equal = msgspec.structs.replace(workload, ranks=RANKS[:1] * SERVED_ADAPTERS)
    capacity_bytes = SLOTS * equal.size_bytes(0)
    base_ns = run_cache(equal, Lru(), capacity_bytes).cost_ns
    floor = offline_bound(equal, capacity_bytes).load_ns / base_ns
    load, first = (
        ours.logged.load_s / lru.logged.load_s,
        ours.first_token_s.p95 / lru.first_token_s.p95,
    )
    return Figure(
        "lab.real",
        ours.logged.load_s,
        f"s of loads with {POLICY}, {SERVED_ADAPTERS} adapters on {SLOTS} slots",
        f"lru: {lru.logged.load_s:.2f} s; first token p95 {1000 * ours.first_token_s.p95:.0f} ms, "
        f"lru {1000 * lru.first_token_s.p95:.0f} ms ({first:.2f}); "
        f"a policy that knows all later requests: {floor:.2f} of lru's loads",
        load,
        "load time <= 0.75, first token p95 <= 0.9",
        load <= 0.75 and first <= 0.9,
    )


def _error(errors: dict[str, list[float]]) -> Figure:
    middle = {name: sorted(found)[len(found) // 2] for name, found in errors.items()}
    texts = [f"{name} {middle[name]:.1%}, at most {max(errors[name]):.1%}" for name in errors]
    return Figure(
        "lab.error",
        100 * middle["throughput"],
        "% of the throughput, median of 9 runs",
        f"the server's own runs; {'; '.join(texts)}",
        middle["throughput"],
        "throughput <= 5 %, first token p50 <= 15 %",
        middle["throughput"] <= 0.05 and middle["first token p50"] <= 0.15,
    )
