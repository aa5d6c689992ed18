"""The figures `control.*`: requests, log, replay, events, and the cost of a known adapter.

End-to-end figures use the real processes and sockets, with the engine on the tiny model. The speed
of the engine is not measured.
"""

import gc
import os
import secrets
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from transitions import Machine

from benchmarks import control_curve, control_events, control_load, control_recovery
from benchmarks.feed import CoreFeed, serve_traffic
from benchmarks.figures import Figure, best_seconds, interleave
from benchmarks.publisher import EVENTS_COUNT
from benchmarks.serving import make_run, running, serving
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.client import Client
from loradock.client.streams import EventCursor
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.replay import replay
from loradock.controller.log.segments import read
from loradock.controller.log.writer import Log
from loradock.controller.server.config import ServerConfig
from loradock.controller.states.machine import build, next_state
from loradock.messages.addresses import endpoint
from loradock.messages.ids import CPU_CACHED, PINNED
from loradock.messages.records import FORMAT, Header, Record
from loradock.messages.requests import HoldAdapter, LoadAdapter, ReleaseAdapter, Request
from loradock.messages.wire import EVENTS, REQUESTS, TOKEN_BYTES

TINY = Path(__file__).parent.parent / "examples" / "tiny"
OUTSTANDING = 64
REQUESTS_PER_ROUND = 20_000
_REPLIES_AT = 20
"""Where the array of replies begins in a frame, after its head."""
_ARRAY_16 = 0xDC
"""The first byte of an array with a size of 16 bits."""
ROUNDS = 5
"""Odd, so that the median is a measurement."""


def run() -> Iterator[Figure]:
    """Measure every figure of the group."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        directory = Path(name)
        with _controller(directory), _echo(directory, synced=True) as synced:
            yield _durable(endpoint(directory, "requests.sock"), synced)
            yield _batch(endpoint(directory, "requests.sock"), synced)
            own = _BareClient(endpoint(directory, "requests.sock"))
            yield from control_load.vs_redis(directory, own.rate, _BareClient(synced).rate)
            with _echo(directory, synced=False) as bare:
                yield _single(directory, bare)
    yield _others_p99()
    yield _replay()
    yield from control_recovery.run()
    yield _state_step()
    yield _events()
    yield control_events.old_events()
    yield from _known_adapters()
    yield from control_curve.run()


def _others_p99() -> Figure:
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        directory = Path(name)
        limits = Limits(max_loras=3, max_cpu_loras=20_000, device_bytes_max=1 << 26)
        control_load.write_known_adapters(directory, limits)
        with _controller(directory):
            client = _BareClient(endpoint(directory, "requests.sock"))
            return control_load.others_p99(directory, client.times_us)


@contextmanager
def _controller(directory: Path) -> Iterator[None]:
    limits = Limits(max_loras=3, max_cpu_loras=8, device_bytes_max=1 << 26)
    config = ServeConfig(
        ServerConfig(str(directory), limits),
        ServeOptions(model=str(TINY / "model"), adapter_roots=(str(TINY / "adapters"),)),
    )
    with serving(config):
        with Client(directory, timeout_s=120) as client:
            client.activate("upper")
        yield


@contextmanager
def _echo(directory: Path, *, synced: bool) -> Iterator[str]:
    address = f"ipc://{directory}/echo-{int(synced)}.sock"
    file = str(directory / "echo.log") if synced else "-"
    command = [sys.executable, "-m", "benchmarks.echo", address, file]
    with running(command, directory / "echo.err"):
        yield address


class _BareClient:
    """A client as bare as the echo: it encodes frames as it sends them, and only counts replies."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._number = 0

    def _send(self, count: int = 1) -> None:
        self._socket.send(REQUESTS.encode(self._requests(count), token=self._token))

    def _requests(self, count: int) -> tuple[Request, ...]:
        numbers = range(self._number, self._number + count)
        self._number += count
        kinds = (HoldAdapter, ReleaseAdapter)
        return tuple([kinds[number % 2](str(number), "upper") for number in numbers])

    def _receive(self) -> int:
        """Receive a frame, and return its number of replies."""
        frame = self._socket.recv()
        first = frame[_REPLIES_AT]
        return first & 15 if first != _ARRAY_16 else int.from_bytes(frame[_REPLIES_AT + 1 :][:2])

    def rate(self) -> float:
        """Return requests per second with `OUTSTANDING` requests in flight, each in a frame."""
        started = time.perf_counter()
        for _ in range(OUTSTANDING):
            self._send()
        sent, received = OUTSTANDING, 0
        while received < REQUESTS_PER_ROUND:
            arrived = self._receive()
            received += arrived
            for _ in range(min(arrived, REQUESTS_PER_ROUND - sent)):
                self._send()
                sent += 1
        return REQUESTS_PER_ROUND / (time.perf_counter() - started)

    def batch_rate(self) -> float:
        """Return requests per second with two frames of `OUTSTANDING` requests in flight."""
        frames = REQUESTS_PER_ROUND // OUTSTANDING
        started = time.perf_counter()
        self._send(OUTSTANDING)
        received = 0
        for _ in range(frames - 1):
            self._send(OUTSTANDING)
            received = self._receive_all(received) - OUTSTANDING
        self._receive_all(received)
        return frames * OUTSTANDING / (time.perf_counter() - started)

    def _receive_all(self, received: int) -> int:
        """Receive frames until `OUTSTANDING` replies have arrived; return their number."""
        while received < OUTSTANDING:
            received += self._receive()
        return received

    def median_us(self) -> float:
        """Return the median round trip of a single request, in microseconds."""
        times = self.times_us(2000)
        return sorted(times)[len(times) // 2]

    def times_us(self, count: int) -> list[float]:
        """Return the round trips of single requests, in microseconds."""
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._send()
            self._socket.recv()
            times.append((time.perf_counter() - started) * 1e6)
        return times


def _durable(address: str, echo: str) -> Figure:
    ours, bare = interleave(_BareClient(address).rate, _BareClient(echo).rate, ROUNDS)
    return Figure(
        "control.durable_64",
        ours,
        "requests/s",
        f"bare echo, same batching and sync: {bare:,.0f}/s",
        ours / bare,
        "ratio >= 0.75",
        ours / bare >= 0.75,
    )


def _batch(address: str, echo: str) -> Figure:
    works = _BareClient(address).batch_rate, _BareClient(echo).batch_rate
    ours, bare = interleave(*works, ROUNDS)
    return Figure(
        "control.batch_64",
        ours,
        "requests/s",
        f"bare echo, frames of {OUTSTANDING}, same batching and sync: {bare:,.0f}/s",
        ours / bare,
        "ratio >= 0.4",
        ours / bare >= 0.4,
    )


def _single(directory: Path, echo: str) -> Figure:
    address = endpoint(directory, "requests.sock")
    ours, bare = interleave(_BareClient(address).median_us, _BareClient(echo).median_us, ROUNDS)
    sync = _sync_us(directory)
    return Figure(
        "control.single_p50",
        ours,
        "us",
        f"bare round trip {bare:.0f} us + one sync {sync:.0f} us",
        ours / (bare + sync),
        "ratio <= 1.6",
        ours / (bare + sync) <= 1.6,
    )


def _sync_us(directory: Path) -> float:
    fd = os.open(directory / "sync", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    times = []
    for _ in range(500):
        started = time.perf_counter()
        os.write(fd, b"x" * 100)
        os.fdatasync(fd)
        times.append(time.perf_counter() - started)
    os.close(fd)
    return sorted(times)[len(times) // 2] * 1e6


def _replay() -> Figure:
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        count, digest = _write_log(Path(name))
        gc.collect()
        ours = count / best_seconds(lambda: _fold(Path(name), digest))
        reading = count / best_seconds(lambda: _read(Path(name)))
    return Figure(
        "control.replay",
        ours,
        "inputs/s",
        f"reading and decoding the same log: {reading:,.0f}/s",
        ours / reading,
        "ratio >= 0.25",
        ours / reading >= 0.25,
    )


def _write_log(directory: Path) -> tuple[int, str]:
    """Write a log of generations over more adapters than slots; return its inputs and digest."""
    limits = Limits(max_loras=32, max_cpu_loras=64)
    feed = CoreFeed(limits, record=True)
    serve_traffic(feed, 50_000, 64)
    header = Header(FORMAT, RULES, "lru", limits_to(limits), 0)
    records = [Record(seq, *entry) for seq, entry in enumerate(feed.inputs)]
    with Log(directory, header) as log:
        for start in range(0, len(records), 1000):
            log.append(records[start : start + 1000], 1)
    return len(records), feed.controller.digest()


def _fold(directory: Path, digest: str) -> None:
    if replay(directory).digest != digest:
        raise RuntimeError("the digest of the replay differs from the controller's")


def _read(directory: Path) -> None:
    for _ in read(directory):
        pass


def _state_step() -> Figure:
    steps = 200_000

    def ours() -> None:
        state = PINNED
        for _ in range(steps // 2):
            state = next_state("a", state, "WeightsUnstaged")
            state = next_state("a", state, "WeightsStaged")

    model = type("Model", (), {})()
    machine: Machine = build(model)
    machine.set_state(CPU_CACHED)

    def plain() -> None:
        for _ in range(steps // 20):
            model.trigger("WeightsStaged")
            model.trigger("WeightsUnstaged")

    ours_ns = best_seconds(ours) / steps * 1e9
    plain_ns = best_seconds(plain) / (steps // 10) * 1e9
    return Figure(
        "control.state_step",
        ours_ns,
        "ns",
        f"a plain transitions trigger: {plain_ns:,.0f} ns",
        ours_ns / plain_ns,
        "ratio <= 0.05",
        ours_ns / plain_ns <= 0.05,
    )


def _events() -> Figure:
    ours, bare = interleave(lambda: _subscribed(_iterate), lambda: _subscribed(_count), 3)
    return Figure(
        "control.events",
        ours,
        "events/s",
        f"receiving and decoding the same frames bare: {bare:,.0f}/s",
        ours / bare,
        ">= 200,000/s",
        ours >= 200_000,
    )


def _subscribed(receive: Callable[[Path], float]) -> float:
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        command = [sys.executable, "-m", "benchmarks.publisher", name]
        make_run(Path(name))
        with running(command, Path(name) / "publisher.err"):
            return receive(Path(name))


def _iterate(directory: Path) -> float:
    """Return the events per second that a client's cursor returns, in order and without a gap."""
    cursor = EventCursor(1, needs_fetch=False)
    seen, started = 0, 0.0
    with _subscription(directory) as socket:
        while seen < EVENTS_COUNT:
            cursor.on_frame(socket.recv())
            while cursor.ready:
                cursor.pop()
                seen += 1
            started = started or (time.perf_counter() if seen else 0.0)
    if cursor.seq != EVENTS_COUNT:
        raise RuntimeError(
            f"the cursor is at event {cursor.seq} of {EVENTS_COUNT}: events were lost"
        )
    return EVENTS_COUNT / (time.perf_counter() - started)


def _count(directory: Path) -> float:
    seen, started = 0, 0.0
    with _subscription(directory) as socket:
        while seen < EVENTS_COUNT:
            seen += len(EVENTS.decode(socket.recv()).message)
            started = started or (time.perf_counter() if seen else 0.0)
    return EVENTS_COUNT / (time.perf_counter() - started)


@contextmanager
def _subscription(directory: Path) -> Iterator["zmq.Socket[bytes]"]:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint(directory, "events.sock"))
    socket.subscribe(EVENTS.prefix)
    try:
        yield socket
    finally:
        socket.close(linger=0)


def _known_adapters() -> Iterator[Figure]:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    large = _known(100_000)
    bytes_each = (tracemalloc.get_traced_memory()[0] - before) / 100_000
    tracemalloc.stop()
    small = _known(1_000)
    few, many = interleave(lambda: _activations_us(small), lambda: _activations_us(large), ROUNDS)
    yield Figure(
        "control.known_adapters",
        bytes_each,
        "bytes each",
        f"2,048 bytes; an activation takes {many:.1f} us among 100,000, {few:.1f} us among 1,000",
        many / few,
        "<= 2,048 bytes and ratio <= 1.5",
        bytes_each <= 2048 and many / few <= 1.5,
    )


def _known(count: int) -> CoreFeed:
    feed = CoreFeed(Limits(max_loras=8, max_cpu_loras=64, answers_max=1000))
    for number in range(count):
        feed.handle(LoadAdapter(feed.request_id(), f"adapter-{number}"))
    feed.controller.digest()
    return feed


def _activations_us(feed: CoreFeed) -> float:
    """Return the microseconds of a generation with its activation and an eviction, with digests."""
    generations = 1000
    started = time.perf_counter()
    serve_traffic(feed, generations, 1000)
    feed.controller.digest()
    return (time.perf_counter() - started) / generations * 1e6
