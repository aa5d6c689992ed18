"""`make soak`: a server under changing load, and whether it grows.

`python -m benchmarks.soak --minutes 60` runs real processes: the controller, its supervisor, an
engine on the tiny model, an HTTP gateway, and clients that come and go. They load, move and evict
adapters, generate, list, hold and fetch events; snapshots are made and old files dropped meanwhile.
Memory, descriptors, threads and the bytes of the log's directory are sampled. At the end their
growth is printed: the slope of Theil and Sen (1968), the median of the slopes between all pairs of
samples. What has a fixed bound is filled before: the tables of clients, answers, refusals and
events, until their memory has its bound too. The blocks of the KV cache, of which there are few,
are used in the first part of the run, which is not counted. The status is 1 if anything grows.
"""

import argparse
import json
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from itertools import combinations, islice
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import zmq
from rich.console import Console
from rich.table import Table

from benchmarks.http_load import free_port, wait_until_served
from benchmarks.serving import serving
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.client import Client
from loradock.controller.core.limits import Limits
from loradock.controller.server.clients import CLIENTS_MAX
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.event_stream import EVENTS_KEPT
from loradock.gateway.options import GatewayConfig
from loradock.messages.addresses import endpoint
from loradock.messages.engine_options import EngineOptions
from loradock.messages.errors import LoradockError
from loradock.messages.requests import EvictAdapter, HoldAdapter, ReleaseAdapter, StatusShown
from loradock.messages.wire import BATCH_MAX, REPLIES, REQUESTS, TOKEN_BYTES

TINY: Final = Path(__file__).parent.parent / "examples" / "tiny"
ADAPTERS: Final = tuple(sorted(path.name for path in (TINY / "adapters").iterdir()))
LIMITS: Final = Limits(max_loras=3, max_cpu_loras=5, answers_max=4096, digest_interval=256)
ENGINE_OPTIONS: Final = EngineOptions(kv_cache_bytes=8 << 20)
SNAPSHOT_INTERVAL: Final = 500
SEGMENT_BYTES: Final = 1 << 20
UNKNOWN: Final = "no-adapter-has-this-name"
CONNECTIONS: Final = 64
"""The connections that are open together while the tables are filled."""

FILLED: Final = 1.5
"""The entries that fill a table, per entry that it keeps.

A dict whose oldest entries are replaced takes twice the memory once a third of them was replaced,
and no more from then on.
"""

CLIENTS: Final = 3
CALLS_PER_CLIENT: Final = 20
PAUSE_S: Final = 0.02
TIMEOUT_S: Final = 120
SAMPLES: Final = 240
WARM_UP: Final = 1 / 3
"""The part of the run that is not counted."""

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Kind(NamedTuple):
    """A sampled quantity: its unit, and its largest growth that counts as flat.

    The growth over the counted part is compared with a part of the median and with a number: pages
    are allocated in steps, and a segment and an event file are dropped when they are whole.
    """

    unit: str
    relative: float
    absolute: float


KINDS: Final = {
    "memory": Kind("MiB", 0.05, 4),
    "descriptors": Kind("", 0, 2),
    "threads": Kind("", 0, 1),
    "log": Kind("MiB", 0.2, SEGMENT_BYTES / 2**20 + 4),
}


class Growth(NamedTuple):
    """The samples of one quantity in the counted part, and what it grew by."""

    name: str
    first: float
    middle: float
    largest: float
    growth: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than is allowed."""
        return self.growth <= self.allowed


def slope(times: list[float], values: list[float]) -> float:
    """Return the median of the slopes between all pairs of samples (Theil and Sen)."""
    pairs = combinations(zip(times, values, strict=True), 2)
    return median((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs)


def growth_of(name: str, times: list[float], values: list[float]) -> Growth:
    """Return the growth over the samples of the quantity `name`, whose first word is its kind."""
    kind, middle = KINDS[name.split(maxsplit=1)[0]], median(values)
    grown = slope(times, values) * (times[-1] - times[0])
    allowed = max(kind.relative * middle, kind.absolute)
    return Growth(name, values[0], middle, max(values), grown, allowed)


def sample(pids: dict[str, int], directory: Path) -> dict[str, float]:
    """Return the quantities of processes and of the log's directory at this moment."""
    values: dict[str, float] = {}
    for name, pid in pids.items():
        process = Path("/proc") / str(pid)
        pages = int((process / "statm").read_text().split()[1])
        values[f"memory {name}"] = pages * _PAGE / 2**20
        values[f"descriptors {name}"] = len(os.listdir(process / "fd"))
        values[f"threads {name}"] = len(os.listdir(process / "task"))
    values["log"] = sum(_size_bytes(path) for path in directory.iterdir()) / 2**20
    return values


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        # Retention has dropped it meanwhile.
        return 0


def fill_tables(directory: Path) -> None:
    """Fill the tables of clients, answers, refusals and events up to their bounds.

    Every client has a connection and a window of its own, so that the tables have their largest
    size.
    """
    clients, answers = int(FILLED * CLIENTS_MAX), int(FILLED * LIMITS.answers_max)
    with zmq.Context() as context:
        for first in range(0, clients, CONNECTIONS):
            with ExitStack() as opened:
                sockets = [
                    opened.enter_context(_connected(context, directory)) for _ in range(CONNECTIONS)
                ]
                # A refusal, and for the last clients an answer.
                calls = 1 + (first >= clients - answers)
                for socket in sockets:
                    batch = (EvictAdapter("1", UNKNOWN), ReleaseAdapter("2", ADAPTERS[0]))[:calls]
                    socket.send(REQUESTS.encode(batch, token=secrets.token_bytes(TOKEN_BYTES)))
                for socket in sockets:
                    _receive(socket, calls)
        with _connected(context, directory) as socket:
            token, kinds = secrets.token_bytes(TOKEN_BYTES), (HoldAdapter, ReleaseAdapter)
            for first in range(0, int(FILLED * EVENTS_KEPT), BATCH_MAX):
                numbers = range(first, first + BATCH_MAX)
                changes = tuple([kinds[n % 2](str(n), ADAPTERS[0]) for n in numbers])
                socket.send(REQUESTS.encode(changes, token=token))
                _receive(socket, BATCH_MAX)


def _connected(context: "zmq.Context[zmq.Socket[bytes]]", directory: Path) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint(directory, "requests.sock"))
    socket.rcvtimeo = TIMEOUT_S * 1000
    return socket


def _receive(socket: "zmq.Socket[bytes]", replies: int) -> None:
    while replies:
        replies -= len(REPLIES.decode(socket.recv()).message)


class Load:
    """Clients that come and go until `stop` is set; `calls` counts what they did."""

    def __init__(self, directory: Path, port: int) -> None:
        """`port`: the gateway's."""
        self.stop: Final = threading.Event()
        self.calls: Counter[str] = Counter()
        self._directory = directory
        self._port = port
        self._failure: Exception | None = None
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clients."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in self._threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 - a choice of calls
        try:
            while not self.stop.wait(PAUSE_S):
                with Client(self._directory, timeout_s=TIMEOUT_S) as client:
                    self.calls["clients"] += 1
                    for _ in range(rng.randrange(1, CALLS_PER_CLIENT)):
                        self._call(client, rng)
        except Exception as error:
            # It is raised by the main thread.
            self._failure = error
            self.stop.set()

    def _call(self, client: Client, rng: random.Random) -> None:
        name = rng.choice(ADAPTERS)
        calls = {
            "generate": lambda: list(client.generate("hello", name, max_tokens=4)),
            "complete": lambda: self._complete(name, stream=rng.random() < 1 / 2),
            "activate": lambda: client.activate(name),
            "load": lambda: client.load(name),
            "evict": lambda: client.evict(name),
            "remove": lambda: client.remove(name),
            "hold": lambda: (client.hold(name), client.release(name)),
            "list": client.list,
            "status": client.status,
            "events": lambda: self._read_events(client),
        }
        chosen = rng.choice(tuple(calls))
        try:
            calls[chosen]()
            self.calls[chosen] += 1
        except LoradockError:
            self.calls["refused"] += 1

    def _complete(self, name: str, *, stream: bool) -> None:
        body = {"model": name, "prompt": "hello", "max_tokens": 4, "stream": stream}
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)) as connection:
            head = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            answer = connection.getresponse()
            answer.read()
        # The others were refused because the adapter has been removed, or has no room.
        self.calls[f"HTTP {answer.status}"] += 1

    @staticmethod
    def _read_events(client: Client) -> None:
        newest = client.status().events_seq
        with client.events(max(1, newest - 500), follow=False) as stream:
            list(islice(stream, 100))


def _config(directory: Path, port: int) -> ServeConfig:
    # Retention drops whole segments.
    server = ServerConfig(
        str(directory),
        LIMITS,
        segment_bytes_max=SEGMENT_BYTES,
        snapshot_interval=SNAPSHOT_INTERVAL,
        log_keep_hours=0,
    )
    model = str(TINY / "model")
    gateway = GatewayConfig(directory=str(directory), port=port, model=model)
    return ServeConfig(
        server,
        ServeOptions(model=model, adapter_roots=(str(TINY / "adapters"),)),
        engine=ENGINE_OPTIONS,
        gateway=gateway,
    )


def _pids(status: StatusShown) -> dict[str, int]:
    """Return the processes by name; the gateway is the supervisor's third one."""
    found = {"controller": status.controller_pid, "engine": status.engine_pid}
    parent = Path(f"/proc/{status.controller_pid}/stat").read_text().rpartition(")")[2].split()[1]
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    [gateway] = set(map(int, children)) - set(found.values())
    return {**found, "gateway": gateway}


def soak(minutes: float, directory: Path, console: Console) -> list[Growth]:
    """Run for some minutes, and return the growth of every quantity."""
    times: list[float] = []
    samples: list[dict[str, float]] = []
    port = free_port()
    load = Load(directory, port)
    with serving(_config(directory, port)):
        with Client(directory, timeout_s=TIMEOUT_S) as client:
            client.activate(ADAPTERS[0])
            wait_until_served(port, TIMEOUT_S)
            fill_tables(directory)
            before = client.status()
        pids = _pids(before)
        started = time.monotonic()
        with load.running():
            while (now := time.monotonic()) - started < minutes * 60 and not load.stop.is_set():
                times.append(now)
                samples.append(sample(pids, directory / "log"))
                time.sleep(max(0.25, minutes * 60 / SAMPLES))
        with Client(directory, timeout_s=TIMEOUT_S) as client:
            after = client.status()
        if _pids(after) != pids:
            raise RuntimeError("a process was restarted: see its log")
    inputs = after.seq - before.seq
    console.print(f"{inputs:,} inputs, a snapshot after {after.snapshot_seq:,}, {dict(load.calls)}")
    first = next(i for i, at in enumerate(times) if at - started >= WARM_UP * minutes * 60)
    return [
        growth_of(name, times[first:], [found[name] for found in samples[first:]])
        for name in samples[0]
    ]


def main() -> int:
    """Run by the command line's duration, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description="Run a server under load and print its growth.")
    parser.add_argument("--minutes", type=float, default=60)
    minutes, console = parser.parse_args().minutes, Console(width=120)
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        found = soak(minutes, Path(name), console)
    table = Table(title=f"{minutes:g} minutes, of which the last two thirds are counted")
    for column in ("quantity", "first", "median", "largest", "growth", "allowed", "flat"):
        table.add_column(column, justify="left" if column == "quantity" else "right")
    for growth in found:
        unit = KINDS[growth.name.split()[0]].unit
        numbers = (growth.first, growth.middle, growth.largest, growth.growth, growth.allowed)
        flat = "yes" if growth.is_flat else "no"
        table.add_row(growth.name, *(f"{number:,.2f} {unit}" for number in numbers), flat)
    console.print(table)
    return 0 if all(growth.is_flat for growth in found) else 1


if __name__ == "__main__":
    sys.exit(main())
