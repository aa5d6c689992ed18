"""The figures of a fleet: the rule in simulated traffic, and a front before real gateways.

The docks of the front are real gateways before stand-ins for their controllers, so that the front
is measured and not an engine. The simulation is `benchmarks.fleet_simulation`.
"""

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Final, NamedTuple

import httpx

from benchmarks.figures import Figure
from benchmarks.fleet_simulation import Result, Traffic, simulate
from benchmarks.http_load import connections, post, rate, seconds
from loradock.fleet.catalogue import WantedAdapter
from loradock.fleet.picker import Load, Picker, Seen
from tests.support.fleet.etcd import etcd, free_ports
from tests.support.fleet.fleets import Clients, Dock, Fleet, Process, pids_of_session
from tests.support.fleet.proxies import Proxy
from tests.support.waiting import wait_until

_SEEDS: Final = range(4)
_TRAFFIC: Final = Traffic(12_000, 160.0)
_HOT: Final = Traffic(6_000, 1_000.0, hot=0.5)
_REQUESTS: Final = 400
_ROUNDS: Final = 15
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
        yield from _costs(fleet, Path(name))
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


class _Server(NamedTuple):
    """Where requests are sent, and the processes that work for them, beside the clients."""

    port: int
    pids: list[int]


class _Cost(NamedTuple):
    """Medians of a server: seconds of one request, requests per second of many clients.

    `processor_s`: seconds of processor time per request, of all processes and the clients.
    """

    latency_s: float
    rate: float
    processor_s: float


def _costs(fleet: Fleet, directory: Path) -> Iterator[Figure]:
    """Compare a front with a dock, with Envoy alone, and with a picker that does not choose."""
    home = fleet.dock_of(fleet.complete("adapter-0").text)
    own, front = pids_of_session(home.process.pid), pids_of_session(fleet.front.process.pid)
    socket, (alone_port, bare_port) = directory / "bare.sock", free_ports(2)
    command = [sys.executable, "-m", "benchmarks.fleet_bare_picker", str(socket), home.address]
    with ExitStack() as stack:
        pipe = {"pipe": {"path": str(socket)}}
        bare = Process(command, directory / "bare.log")
        stack.callback(bare.kill)
        alone = Proxy(directory / "alone", alone_port, [home.address])
        stack.callback(alone.kill)
        asking = Proxy(directory / "asking", bare_port, [home.address], pipe)
        stack.callback(asking.kill)
        servers = {
            "dock": _Server(home.port, own),
            "alone": _Server(alone_port, [*own, alone.process.pid]),
            "bare": _Server(bare_port, [*own, asking.process.pid, bare.process.pid]),
            "front": _Server(fleet.port, [*own, *front]),
        }
        for port in (alone_port, bare_port):
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
                wait_until(lambda http=http: fleet.serves(http), what="a proxy")
        costs = asyncio.run(_measure(servers))
    yield from _figures(costs)


def _figures(costs: dict[str, _Cost]) -> Iterator[Figure]:
    dock, alone, bare, front = (costs[name] for name in ("dock", "alone", "bare", "front"))
    added_ms = (front.latency_s - dock.latency_s) * 1e3
    yield Figure(
        "fleet.added_p50", added_ms, "ms (p50) that the front adds, one client",
        f"the dock directly: {dock.latency_s * 1e3:.1f} ms; Envoy alone adds "
        f"{(alone.latency_s - dock.latency_s) * 1e3:.2f}, and with a picker that does not choose "
        f"{(bare.latency_s - dock.latency_s) * 1e3:.2f}",
        front.latency_s / dock.latency_s, "<= 2 ms", added_ms <= 2.0,
    )  # fmt: skip
    yield Figure(
        "fleet.throughput", front.rate, f"requests/s through the front, {_CLIENTS} clients",
        f"the dock directly: {dock.rate:.0f}/s; Envoy alone {alone.rate / dock.rate:.2f} of that, "
        f"and with a picker that does not choose {bare.rate / dock.rate:.2f}",
        front.rate / dock.rate, "ratio >= 0.8", front.rate >= 0.8 * dock.rate,
    )  # fmt: skip
    ratio = front.processor_s / dock.processor_s
    yield Figure(
        "fleet.processor", front.processor_s * 1e6,
        "µs of processor time per request through the front: clients, Envoy, picker, dock",
        f"the dock directly: {dock.processor_s * 1e6:.0f} µs; Envoy alone "
        f"{alone.processor_s / dock.processor_s:.2f} of that, and with a picker that does not "
        f"choose {bare.processor_s / dock.processor_s:.2f}",
        ratio, "ratio <= 1.25", ratio <= 1.25,
    )  # fmt: skip


def _request() -> bytes:
    body = {"model": "adapter-0", "prompt": "x", "max_tokens": 1}
    return post("/v1/completions", json.dumps(body).encode())


async def _measure(servers: dict[str, _Server]) -> dict[str, _Cost]:
    """Measure all servers in turns, so that each gets its share of what else runs here."""
    found: dict[str, list[_Cost]] = {name: [] for name in servers}
    for round_ in range(_ROUNDS + 1):
        for name, server in servers.items():
            opened = await connections(server.port, _CLIENTS)
            latency_s = median(await seconds(opened[0], _request(), 100))
            before = _processor_s(server.pids)
            per_s = await rate(opened, _request(), _REQUESTS)
            used_s = (_processor_s(server.pids) - before) / _REQUESTS
            for connection in opened:
                connection.close()
            # The first round opens the proxies' connections.
            if round_:
                found[name].append(_Cost(latency_s, per_s, used_s))
    return {name: _Cost(*map(median, zip(*costs, strict=True))) for name, costs in found.items()}


def _processor_s(pids: list[int]) -> float:
    """Return the processor time of processes, and of this one, which is the clients'."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


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
