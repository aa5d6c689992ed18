"""A server makes snapshots while it serves, begins with the last one, and drops old segments."""

import fcntl
import itertools
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from loradock.cli.serve.children import is_stopped, process_tree
from loradock.controller.log.format import LogCorrupt
from loradock.controller.log.replay import replay
from loradock.controller.log.segments import LOCK_NAME, segment_paths
from loradock.controller.log.snapshots import snapshot_paths
from loradock.messages.requests import LoadAdapter, StatusShown
from tests.support.engine.serve_process import is_alive, wait_for_end
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation.shell_examples import RawClient, eventually

OPTIONS = {
    "snapshot_interval": 40,
    "log_keep_hours": 0,
    "segment_bytes_max": 2000,
    "checked": True,
}
REQUESTS = 100
"""Requests of one life of the controller: more than two intervals."""


def serve_requests(directory: Path, life: int) -> tuple[ControllerProcess, StatusShown]:
    """Start a controller, send it requests until it has made a snapshot of them, and kill it."""
    with controller(directory, **OPTIONS) as process, RawClient(directory) as client:
        first = eventually(client.status)
        for number in range(REQUESTS):
            client.send_request(LoadAdapter(f"r-{life}-{number}", f"a-{life}-{number}"))

        def has_made_one() -> StatusShown | None:
            status: StatusShown = client.status()
            is_new = status.snapshot_seq > first.seq and status.seq >= first.seq + REQUESTS
            return status if is_new else None

        status: StatusShown = eventually(has_made_one, "a snapshot")
        process.kill()
    return process, status


def test_a_killed_server_begins_with_its_last_snapshot(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    base = 0
    for life in range(3):
        process, status = serve_requests(directory, life)
        started = process.output().rpartition("recovered")[2].splitlines()[0]
        assert f"snapshot={base}" in started
        result = replay(directory / "log", status.seq, checked=True)
        assert (result.digest, result.divergence) == (status.digest, None)
        assert status.log_bytes > 0
        base = int(snapshot_paths(directory / "log")[-1].stem)
        assert base >= status.snapshot_seq
    assert len(snapshot_paths(directory / "log")) == 2
    # Restarts do not need the first records, so they are gone.
    assert int(segment_paths(directory / "log")[0].stem) > 1
    with pytest.raises(LogCorrupt, match="missing"):
        replay(directory / "log", from_start=True)


def is_locked(directory: Path) -> bool:
    """Return whether a process holds the snapshotters' lock."""
    with (directory / "log" / LOCK_NAME).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stopped_with_lock(snapshotter: int, directory: Path) -> bool:
    """Stop a snapshotter; return whether it is stopped and has its lock, else let it continue."""
    with suppress(ProcessLookupError):
        os.kill(snapshotter, signal.SIGSTOP)
        eventually(lambda: is_stopped(snapshotter) or not is_alive(snapshotter))
        if is_stopped(snapshotter) and is_locked(directory):
            return True
        os.kill(snapshotter, signal.SIGCONT)
    return False


def test_a_stopped_snapshotter_ends_with_its_killed_server(tmp_path: Path) -> None:
    """It holds a lock, without which the next server can't make the snapshot."""
    directory = tmp_path / "d"
    numbers = itertools.count()

    def send_requests(client: RawClient) -> None:
        names = itertools.islice(numbers, REQUESTS)
        client.send_request(*(LoadAdapter(f"r-{number}", f"a-{number}") for number in names))
        client.status()

    with controller(directory, **OPTIONS) as process, RawClient(directory) as client:

        def stopped() -> int:
            snapshotters = process_tree(process.pid)[1:]
            if not snapshotters:
                send_requests(client)
            elif is_locked(directory) and stopped_with_lock(snapshotters[0], directory):
                return snapshotters[0]
            return 0

        eventually(client.status)
        snapshotter = eventually(stopped, "a snapshotter with its lock")
        process.kill()
    wait_for_end(snapshotter)
    made = snapshot_paths(directory / "log")
    with controller(directory, **OPTIONS), RawClient(directory) as client:
        send_requests(client)
        eventually(lambda: snapshot_paths(directory / "log") != made, "a snapshot")
