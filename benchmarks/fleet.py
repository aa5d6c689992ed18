"""The figures of a fleet: the rule in simulated traffic, and a front before real gateways.

The docks of the front are real gateways before stand-ins for their controllers, so that the front
is measured and not an engine. The simulation is `benchmarks.fleet_simulation`.
"""

import asyncio
import json
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Final

from benchmarks.figures import Figure
from benchmarks.fleet_simulation import Result, Traffic, simulate
from benchmarks.http_load import connections, post, rate, seconds
from loradock.fleet.catalogue import WantedAdapter
from loradock.fleet.picker import Load, Picker, Seen
from tests.support.fleet.etcd import etcd
from tests.support.fleet.fleets import Clients, Dock, Fleet

_SEEDS: Final = range(4)
_TRAFFIC: Final = Traffic(12_000, 160.0)
_HOT: Final = Traffic(6_000, 1_000.0, hot=0.5)
_REQUESTS: Final = 800
_ROUNDS: Final = 5
_CLIENTS: Final = 16
_DOCKS: Final = 1_000
_ADAPTERS: Final = 100_000
_DECISIONS: Final = 40_000
_STARTED_S: Final = 60.0


def run() -> Iterator[Figure]:
    """Measure all figures; those of the front only if etcd is installed."""
    yield from _rule()
    yield _scale()
    if shutil.which("etcd"):
        yield from _front()


def _rule() -> Iterator[Figure]:
    found = {
        rule: [simulate(rule, _TRAFFIC, seed) for seed in _SEEDS]
        for rule in ("picker", "round-robin", "hashing")
    }
    loads = {rule: mean(one.activations for one in results) for rule, results in found.items()}
    for other, aim, name in (("round-robin", 0.55, "turns"), ("hashing", 1.0, "hashing")):
        ratio = loads["picker"] / loads[other]
        yield Figure(
            f"fleet.loads_{name}", loads["picker"], "activations of 12,000 requests, simulated",
            f"{other}: {loads[other]:.0f}", ratio, f"ratio <= {aim}", ratio <= aim,
        )  # fmt: skip
    busiest, hashed = _mean(found["picker"], "busiest"), _mean(found["hashing"], "busiest")
    yield Figure(
        "fleet.busiest", busiest, "of the requests at the busiest of 3 docks, simulated",
        f"consistent hashing: {hashed:.2f}", busiest / hashed, "<= 0.40", busiest <= 0.40,
    )  # fmt: skip
    p99, others = _mean(found["picker"], "p99_s"), _mean(found["hashing"], "p99_s")
    yield Figure(
        "fleet.p99", p99 * 1e3, "ms (p99) at equal load, simulated",
        f"consistent hashing: {others * 1e3:.0f} ms", p99 / others, "ratio <= 0.8",
        p99 <= 0.8 * others,
    )  # fmt: skip
    one, three = simulate("picker", _HOT, docks=1), simulate("picker", _HOT)
    gain = one.seconds / three.seconds
    yield Figure(
        "fleet.hot", _HOT.requests / three.seconds,
        "requests/s of 3 docks, half of them for one adapter, simulated",
        f"one dock: {_HOT.requests / one.seconds:.0f}/s", gain, "ratio >= 2.5", gain >= 2.5,
    )  # fmt: skip


def _mean(results: list[Result], field: str) -> float:
    return mean(getattr(one, field) for one in results)


def _scale() -> Figure:
    """Measure decisions with many docks and adapters, each adapter by Zipf's law."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    generator, picker = random.Random(0), Picker()  # noqa: S311 - traffic, no secrets
    docks = [f"10.0.{number // 256}.{number % 256}:8001" for number in range(_DOCKS)]
    names = [f"adapter-{number}" for number in range(_ADAPTERS)]
    picker.set_docks(dict.fromkeys(docks, 8))
    picker.set_wanted({name: WantedAdapter(name) for name in names})
    for dock in docks:
        states = ["gpu-slot"] * 8 + ["pinned"] * 92
        seen = {generator.choice(names): Seen(state) for state in states}
        picker.on_snapshot(dock, seen)
        picker.on_load(dock, Load(generator.randrange(5), 8), 0.0)
    weights = [1 / (rank + 1) for rank in range(_ADAPTERS)]
    chosen = generator.choices(names, weights, k=_DECISIONS)
    for begin in (0.0, 10.0):
        # The second time: rendezvous orders are computed once per adapter.
        began = time.process_time()
        for number, name in enumerate(chosen):
            picker.pick(name, begin + number / 5_000)
        per_s = _DECISIONS / (time.process_time() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Figure(
        "fleet.scale", per_s, f"decisions/s among {_DOCKS:,} docks and {_ADAPTERS:,} adapters",
        f"5,000/s; the picker's memory: {grown:.0f} MiB", per_s / 5_000, ">= 5,000/s",
        per_s >= 5_000,
    )  # fmt: skip


def _front() -> Iterator[Figure]:
    with (
        tempfile.TemporaryDirectory() as name,
        etcd(Path(name) / "etcd") as cluster,
        Fleet(cluster, Path(name)) as fleet,
    ):
        home = fleet.dock_of(fleet.complete("adapter-0").text)
        direct, through = asyncio.run(_latencies(home.port, fleet.port))
        added_ms = (through - direct) * 1e3
        yield Figure(
            "fleet.added_p50", added_ms, "ms (p50) that the front adds, one client",
            f"the dock directly: {direct * 1e3:.1f} ms", through / direct, "<= 2 ms",
            added_ms <= 2.0,
        )  # fmt: skip
        direct, through = asyncio.run(_rates(home.port, fleet.port))
        yield Figure(
            "fleet.throughput", through, f"requests/s through the front, {_CLIENTS} clients",
            f"the dock directly: {direct:.0f}/s", through / direct, "ratio >= 0.8",
            through >= 0.8 * direct,
        )  # fmt: skip
        for number, what, bound_s in (
            (signal.SIGKILL, "killed", 1.0),
            (signal.SIGSTOP, "stopped", 6.0),
        ):
            dock = fleet.dock_of(fleet.complete("adapter-0").text)
            last_s, longest_s, failed = _loss(fleet, dock, number)
            yield Figure(
                f"fleet.{what}", last_s,
                f"s from a dock's end to the last decision for it ({what}, under load)",
                f"the bound; {failed} requests failed, the longest took {longest_s:.1f} s",
                last_s / bound_s, f"<= {bound_s:g} s, none failed",
                last_s <= bound_s and not failed,
            )  # fmt: skip


def _request() -> bytes:
    body = {"model": "adapter-0", "prompt": "x", "max_tokens": 1}
    return post("/v1/completions", json.dumps(body).encode())


async def _latencies(dock: int, front: int) -> tuple[float, float]:
    found: dict[int, list[float]] = {dock: [], front: []}
    for _ in range(_ROUNDS):
        for port, times in found.items():
            (connection,) = await connections(port, 1)
            times.extend(await seconds(connection, _request(), 100))
            connection.close()
    return median(found[dock]), median(found[front])


async def _rates(dock: int, front: int) -> tuple[float, float]:
    found: dict[int, list[float]] = {dock: [], front: []}
    for _ in range(_ROUNDS):
        for port, rates in found.items():
            opened = await connections(port, _CLIENTS)
            rates.append(await rate(opened, _request(), _REQUESTS))
            for connection in opened:
                connection.close()
    return median(found[dock]), median(found[front])


def _loss(fleet: Fleet, dock: Dock, number: signal.Signals) -> tuple[float, float, int]:
    """End a dock under load; return how long it was chosen, in seconds.

    Also the seconds of the longest request, and the number of requests that failed.
    """
    with Clients(fleet) as clients:
        clients.wait_for(40)
        began = last = time.monotonic()
        dock.signal(number)
        while time.monotonic() - began < 8.0:
            shown = fleet.status()["docks"].get(dock.address)
            if shown and shown["ready"]:
                last = time.monotonic()
            time.sleep(0.02)
    longest_s = max(one.elapsed_s for one in clients.answers)
    failed = sum(one.status != 200 for one in clients.answers)
    dock.signal(signal.SIGCONT)
    if number == signal.SIGKILL:
        dock.process.wait()
        fleet.restart(dock)
    end = time.monotonic() + _STARTED_S
    while not fleet.is_whole() and time.monotonic() < end:
        time.sleep(0.1)
    return last - began, longest_s, failed
