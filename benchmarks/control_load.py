"""The figures `control.vs_redis` and `control.others_p99`: the same load on Redis, and fairness.

Debian's Redis (`redis-server`) is measured where it is installed. It appends every write to a file
on the same disk and syncs it before it answers, as the controller does. Each side is driven by the
cheapest client that Python allows, with the same number of requests in flight.
"""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.feed import CoreFeed
from benchmarks.figures import Figure, interleave
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.writer import Log
from loradock.messages.records import FORMAT, Header, Record
from loradock.messages.requests import LoadAdapter

OUTSTANDING = 64
REQUESTS_PER_ROUND = 20_000
ROUNDS = 5
ADAPTERS = 10_000
LISTERS = 4
SAMPLES = 4_000


class RedisClient:
    """Writes one key per request over a Unix socket, and counts replies."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._number = 0

    def _send(self) -> None:
        # As long as a request: command, a key that changes, and the adapter's name.
        self._number += 1
        key = b"client-%d" % self._number
        self._socket.send(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$5\r\nupper\r\n" % (len(key), key))

    def rate(self) -> float:
        """Return requests per second with `OUTSTANDING` requests in flight."""
        started = time.perf_counter()
        for _ in range(OUTSTANDING):
            self._send()
        left = REQUESTS_PER_ROUND
        to_send = REQUESTS_PER_ROUND - OUTSTANDING
        while left:
            answered = self._socket.recv(65_536).count(b"+OK\r\n")
            left -= answered
            for _ in range(min(answered, to_send)):
                self._send()
            to_send -= min(answered, to_send)
        return REQUESTS_PER_ROUND / (time.perf_counter() - started)


@contextmanager
def redis(directory: Path) -> Iterator[Path]:
    """Run a Redis that syncs every write, and yield the path of its socket."""
    path = directory / "redis.sock"
    options = {
        "port": "0",
        "unixsocket": str(path),
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "loglevel": "warning",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL)  # noqa: S607
    try:
        while not path.exists():
            time.sleep(0.01)
        yield path
    finally:
        process.terminate()
        process.wait(30)


def vs_redis(
    directory: Path, rate: Callable[[], float], echo_rate: Callable[[], float]
) -> Iterator[Figure]:
    """Compare the controller's `rate` with Redis', and with that of an echo; none without Redis."""
    if shutil.which("redis-server") is None:
        print("control.vs_redis is not measured: redis-server is not installed")
        return
    with redis(directory) as path:
        theirs_of = RedisClient(path).rate
        ours, theirs = interleave(rate, theirs_of, ROUNDS)
        echo, beside = interleave(echo_rate, theirs_of, ROUNDS)
    floor = echo / beside
    yield Figure(
        "control.vs_redis",
        ours,
        "requests/s",
        f"Redis, appendfsync always, same disk: {theirs:,.0f}/s; the bare echo: {floor:.2f} of it",
        ours / theirs,
        "ratio >= 0.75 of the echo's",
        ours / theirs >= 0.75 * floor,
    )


_LISTER = (
    "import sys; from loradock.client import Client\n"
    "with Client(sys.argv[1], timeout_s=600) as client:\n"
    "    while True: client.list()"
)
"""A client that lists all adapters without a pause, in a process of its own."""


def write_known_adapters(directory: Path, limits: Limits) -> None:
    """Write a controller's log after which `ADAPTERS` adapters are known."""
    feed = CoreFeed(limits, record=True)
    for number in range(ADAPTERS):
        feed.handle(LoadAdapter(feed.request_id(), f"adapter-{number}"))
    header = Header(FORMAT, RULES, "lru", limits_to(limits), 0)
    records = [Record(seq, *entry) for seq, entry in enumerate(feed.inputs)]
    with Log(directory / "log", header, sync="never") as log:
        for start in range(0, len(records), 1000):
            log.append(records[start : start + 1000], 1)


def others_p99(directory: Path, times_us: Callable[[int], list[float]]) -> Figure:
    """Compare durable requests' 99th percentile while others list adapters with a quiet one.

    `times_us` returns the round trips of a number of single requests, in microseconds.
    """
    quiet, listing = [], []
    for _ in range(ROUNDS):
        quiet += times_us(SAMPLES)
        with _listers(directory):
            times_us(SAMPLES // 10)
            listing += times_us(SAMPLES)
    base, ours = (sorted(times)[len(times) * 99 // 100] for times in (quiet, listing))
    return Figure(
        "control.others_p99",
        ours,
        "us",
        f"without the {LISTERS} clients that list {ADAPTERS:,} adapters: {base:,.0f} us",
        ours / base,
        "ratio <= 2",
        ours / base <= 2,
    )


@contextmanager
def _listers(directory: Path) -> Iterator[None]:
    command = [sys.executable, "-c", _LISTER, str(directory)]
    listers = [subprocess.Popen(command) for _ in range(LISTERS)]
    try:
        yield
    finally:
        for lister in listers:
            lister.kill()
            lister.wait()
