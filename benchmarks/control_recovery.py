"""The figures `control.recovery` and `control.snapshot_pause`: restarts, and requests meanwhile.

Both have a log of 10,000 adapters, a snapshot of them and 20,000 records after it.
"""

import gc
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.feed import CoreFeed, serve_traffic
from benchmarks.figures import Figure, best_seconds
from controller.core.limits import RULES, Limits, limits_to
from controller.log.replay import replay
from controller.log.retention import Retention
from controller.log.segments import read
from controller.log.snapshots import read_snapshot, snapshot_paths
from controller.log.snapshotter import NICENESS, SnapshotOrder, make_snapshot
from controller.log.world_state import WorldState
from controller.log.writer import Log
from messages.ids import Seq
from messages.own_processes import process_command
from messages.records import FORMAT, Header, Record
from messages.requests import LoadAdapter

ADAPTERS = 10_000
TAIL = 20_000
PAUSES = 5
"""Snapshots of which the longest delays are measured; odd, so that the median is one of them."""

_KEEP = Retention("keep")
_decode_world = msgspec.msgpack.Decoder(WorldState).decode


def run() -> Iterator[Figure]:
    """Measure both figures."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        directory = Path(name) / "log"
        feed, snapshot_seq = _write(directory)
        yield _recovery(directory, snapshot_seq, feed.controller.digest())
        yield _snapshot_pause(directory)


def _write(directory: Path) -> tuple[CoreFeed, Seq]:
    """Write the log; its second segment begins after the snapshot."""
    limits = Limits(slots_max=32, host_adapters_max=64)
    feed = CoreFeed(limits, record=True)
    for number in range(ADAPTERS):
        feed.handle(LoadAdapter(feed.request_id(), f"adapter-{number}"))
    snapshot_seq = len(feed.inputs)
    while len(feed.inputs) < snapshot_seq + TAIL:
        serve_traffic(feed, 100, 64)
    header = Header(FORMAT, RULES, "lru", limits_to(limits), 0)
    records = [Record(seq, *entry) for seq, entry in enumerate(feed.inputs)]
    for part in (records[:snapshot_seq], records[snapshot_seq:]):
        with Log.open(directory, header, segment_bytes_max=1) as log:
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
        "ratio <= 3",
        ours / reading <= 3,
    )


def _recover(directory: Path, digest: str) -> None:
    result = replay(directory)
    if result.digest != digest or not result.snapshot_seq:
        raise RuntimeError("the recovered state differs, or no snapshot was used")


def _read(directory: Path, snapshot_seq: Seq) -> None:
    _decode_world(read_snapshot(snapshot_paths(directory)[-1]).world)
    for _ in read(directory, snapshot_seq + 1):
        pass


def _snapshot_pause(directory: Path) -> Figure:
    """Compare the longest synced append with a snapshotter at work to the longest without."""
    with tempfile.TemporaryDirectory(prefix="ld-", dir=directory.parent) as name:
        other = Path(name) / "log"
        header = Header(FORMAT, RULES, "lru", limits_to(Limits()), 0)
        with Log.open(other, header) as log:
            quiet, during = [], []
            for _ in range(PAUSES):
                during_s, seconds = _longest_during_snapshot(directory, log)
                during.append(during_s)
                quiet.append(_longest_s(log, time.perf_counter() + seconds))
    ours, bare = (sorted(times)[PAUSES // 2] * 1000 for times in (during, quiet))
    return Figure(
        "control.snapshot_pause",
        ours,
        "ms",
        f"the longest request without a snapshot: {bare:.1f} ms",
        ours / bare,
        "ratio <= 2",
        ours / bare <= 2,
    )


def _longest_during_snapshot(directory: Path, log: Log) -> tuple[float, float]:
    """Return the longest append while a process makes a snapshot, and that process's duration."""
    for path in snapshot_paths(directory)[1:]:
        path.unlink()
    last_seq = max(seq for seq, _, _ in read(directory))
    order = msgspec.json.encode(SnapshotOrder(last_seq, _KEEP)).decode()
    command = [*process_command("snapshotter"), str(directory), order]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        longest_s = 0.0
        while process.poll() is None:
            longest_s = max(longest_s, _append_s(log))
    if process.returncode:
        raise RuntimeError(f"the snapshotter ended with status {process.returncode}")
    return longest_s, time.perf_counter() - started


def _longest_s(log: Log, until: float) -> float:
    longest_s = 0.0
    while time.perf_counter() < until:
        longest_s = max(longest_s, _append_s(log))
    return longest_s


def _append_s(log: Log) -> float:
    """Append one record durably, as a group of a single request; return the seconds."""
    started = time.perf_counter()
    log.append([Record(log.next_seq, LoadAdapter("bench", "adapter"))], 1)
    return time.perf_counter() - started
