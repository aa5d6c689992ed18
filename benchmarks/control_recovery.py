"""The figures `control.recovery` and `control.snapshot_pause`: restarts, and requests meanwhile.

Both have a log of 10,000 adapters. The first has a snapshot of them and 20,000 records after it.
"""

import gc
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import msgspec
import zmq

from benchmarks.control_load import write_known_adapters
from benchmarks.feed import CoreFeed, serve_traffic
from benchmarks.figures import Figure, best_seconds
from benchmarks.serving import serving
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.client import Client
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.replay import replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import read
from loradock.controller.log.snapshots import WorldState, read_snapshot, snapshot_paths
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.controller.log.writer import Log
from loradock.controller.server.config import ServerConfig
from loradock.messages.addresses import endpoint
from loradock.messages.ids import Seq
from loradock.messages.records import FORMAT, Header, Record
from loradock.messages.requests import LoadAdapter, ReleaseAdapter
from loradock.messages.wire import REQUESTS, TOKEN_BYTES

ADAPTERS = 10_000
TAIL = 20_000
PAUSES = 5
"""Snapshots of which the longest delays are measured; odd, so that the median is one of them."""
PAUSE_INTERVAL = 4_000
"""The inputs between two snapshots: more than are handled while one is made."""

_KEEP = Retention("keep")
_decode_world = msgspec.msgpack.Decoder(WorldState).decode


def run() -> Iterator[Figure]:
    """Measure both figures."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        directory = Path(name) / "log"
        feed, snapshot_seq = _write(directory)
        yield _recovery(directory, snapshot_seq, feed.controller.digest())
    yield _snapshot_pause()


def _write(directory: Path) -> tuple[CoreFeed, Seq]:
    """Write the log; its second segment begins after the snapshot."""
    limits = Limits(max_loras=32, max_cpu_loras=64)
    feed = CoreFeed(limits, record=True)
    for number in range(ADAPTERS):
        feed.handle(LoadAdapter(feed.request_id(), f"adapter-{number}"))
    snapshot_seq = len(feed.inputs)
    while len(feed.inputs) < snapshot_seq + TAIL:
        serve_traffic(feed, 100, 64)
    header = Header(FORMAT, RULES, "lru", limits_to(limits), 0)
    records = [Record(seq, *entry) for seq, entry in enumerate(feed.inputs)]
    for part in (records[:snapshot_seq], records[snapshot_seq:]):
        with Log(directory, header, segment_bytes_max=1) as log:
            log.append(part, 1)
    make_snapshot(directory, SnapshotOrder(snapshot_seq, _KEEP))
    return feed, snapshot_seq


def _recovery(directory: Path, snapshot_seq: Seq, digest: str) -> Figure:
    gc.collect()
    ours = best_seconds(lambda: _recover(directory, digest)) * 1000
    reading = best_seconds(lambda: _read(directory, snapshot_seq)) * 1000
    return Figure(
        "control.recovery",
        ours,
        "ms",
        f"reading and decoding the same snapshot and records: {reading:,.0f} ms",
        ours / reading,
        "ratio <= 2.5",
        ours / reading <= 2.5,
    )


def _recover(directory: Path, digest: str) -> None:
    result = replay(directory)
    if result.digest != digest or not result.snapshot_seq:
        raise RuntimeError("the recovered state differs, or no snapshot was used")


def _read(directory: Path, snapshot_seq: Seq) -> None:
    _decode_world(read_snapshot(snapshot_paths(directory)[-1]).world)
    for _ in read(directory, snapshot_seq + 1):
        pass


def _snapshot_pause() -> Figure:
    """Compare a real server's longest request while it makes a snapshot to the longest without."""
    limits = Limits(max_loras=32, max_cpu_loras=64)
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        directory = Path(name)
        write_known_adapters(directory, limits)
        server = ServerConfig(name, limits, snapshot_interval=PAUSE_INTERVAL)
        with serving(ServeConfig(server, ServeOptions(engine="external"))):
            with Client(directory, timeout_s=120) as client:
                pid = client.status().controller_pid
            quiet, during = _longest_ms(directory, pid)
    ours, bare = (sorted(times)[PAUSES // 2] for times in (during, quiet))
    return Figure(
        "control.snapshot_pause",
        ours,
        "ms",
        f"the longest request of the same number without a snapshot: {bare:.1f} ms",
        ours / bare,
        "ratio <= 2 and <= 5 ms more",
        ours / bare <= 2 and ours - bare <= 5,
    )


def _longest_ms(directory: Path, pid: int) -> tuple[list[float], list[float]]:
    """Return the longest requests before and during each of `PAUSES` snapshots."""
    before: list[float] = []
    during: list[float] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint(directory, "requests.sock"))
        token = secrets.token_bytes(TOKEN_BYTES)
        numbers = count()
        while len(during) < PAUSES:
            quiet = _times_ms(socket, token, numbers, lambda: not _has_child(pid))
            busy = _times_ms(socket, token, numbers, lambda: _has_child(pid))
            # The first snapshot is that of the whole log, and begins soon after the start.
            if len(quiet) >= len(busy) > 0:
                before.append(max(quiet[-len(busy) :]))
                during.append(max(busy))
    return before, during


def _times_ms(
    socket: "zmq.Socket[bytes]",
    token: bytes,
    numbers: Iterator[int],
    goes_on: Callable[[], bool],
) -> list[float]:
    """Return the times of single logged requests, as long as `goes_on` returns true."""
    times = []
    while goes_on():
        request = ReleaseAdapter(str(next(numbers)), "adapter-1")
        started = time.perf_counter()
        socket.send(REQUESTS.encode((request,), token=token))
        socket.recv()
        times.append((time.perf_counter() - started) * 1000)
    return times


def _has_child(pid: int) -> bool:
    """Whether a process has a child; a controller's only children are snapshotters."""
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())
