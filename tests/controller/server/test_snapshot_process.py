"""A server makes snapshots meanwhile, begins with the last one, and survives their failure."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.controller.log.replay import replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import segment_paths
from loradock.controller.log.snapshots import snapshot_paths
from loradock.controller.log.snapshotter import (
    EXIT_BUSY,
    EXIT_FAILED,
    LOCK_NAME,
    SnapshotMade,
    SnapshotOrder,
)
from loradock.controller.log.storage import DISK
from loradock.controller.server import snapshot_process
from loradock.controller.server.snapshot_process import SnapshotProcess, log_bytes
from loradock.processes.subprocesses import process_command
from tests.support.simulation.logged_histories import write_history
from tests.support.waiting import wait_until

KEEP = Retention("keep")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The lines that are logged, by their first word."""
    lines: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def info(self, text: str, **fields: Any) -> None:
            lines.append((text, fields))

        warning = info

    monkeypatch.setattr(snapshot_process, "log", Recorder())
    return lines


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SnapshotProcess]:
    write_history(tmp_path / "log")
    process = SnapshotProcess(tmp_path / "log", 20, KEEP)
    yield process
    process.close()


def ticked(process: SnapshotProcess, seq: int, reports: list[Any], count: int = 1) -> None:
    """Tick until `count` lines are logged."""

    def has_reported() -> bool:
        process.tick(seq)
        return len(reports) >= count

    wait_until(has_reported, what="a report of the snapshotter")


def test_a_snapshot_is_made_once_per_interval(
    process: SnapshotProcess, reports: list[Any], tmp_path: Path
) -> None:
    process.tick(19)
    assert process._process is None
    ticked(process, 20, reports)
    assert reports[0][0] == "snapshot made"
    assert (reports[0][1]["seq"], process.snapshot_seq) == (20, 20)
    process.tick(39)
    assert process._process is None
    ticked(process, 41, reports, 2)
    assert [int(path.stem) for path in snapshot_paths(tmp_path / "log")] == [20, 41]
    assert process.log_bytes() == log_bytes(tmp_path / "log")


def test_a_recovered_snapshot_counts(process: SnapshotProcess, reports: list[Any]) -> None:
    ticked(process, 20, reports)
    again = SnapshotProcess(process._directory, 20, KEEP)
    again.on_recovered(replay(process._directory).snapshot, 39)
    again.tick(39)
    assert again._process is None
    assert again.snapshot_seq == process.snapshot_seq
    assert again.snapshot_time_ns == process.snapshot_time_ns


def test_a_start_makes_the_snapshot_that_former_ones_did_not_live_to_make(
    process: SnapshotProcess, reports: list[Any], tmp_path: Path
) -> None:
    process.on_recovered(None, 39)
    assert not snapshot_paths(tmp_path / "log")
    process.on_recovered(None, 40)
    assert (reports[0][1]["seq"], process.snapshot_seq) == (40, 40)
    assert replay(tmp_path / "log").snapshot_seq == 40
    process.tick(59)
    assert process._process is None
    reports.clear()
    [path] = snapshot_paths(tmp_path / "log")
    with (tmp_path / "log" / LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process.on_recovered(None, 80)
    assert reports[0][0] == "no snapshot was made"
    assert [path] == snapshot_paths(tmp_path / "log")


def test_failures_are_reported_and_the_next_interval_tries_again(
    process: SnapshotProcess, reports: list[Any], tmp_path: Path
) -> None:
    path = segment_paths(tmp_path / "log")[0]
    data = path.read_bytes()
    path.write_bytes(data[:200])
    ticked(process, 20, reports)
    assert reports[0][0] == "no snapshot was made"
    assert str(path) in reports[0][1]["reason"]
    path.write_bytes(data)
    process.tick(39)
    assert process._process is None
    ticked(process, 40, reports, 2)
    assert reports[1][0] == "snapshot made"


def test_a_killed_or_second_snapshotter_is_harmless(
    process: SnapshotProcess, reports: list[Any], tmp_path: Path
) -> None:
    process.tick(20)
    assert process._process is not None
    process._process.send_signal(signal.SIGKILL)
    ticked(process, 20, reports)
    assert reports[0][1]["status"] == -signal.SIGKILL
    fd = DISK.create(tmp_path / "log" / LOCK_NAME)
    DISK.lock(fd)
    ticked(process, 40, reports, 2)
    assert reports[1][1]["status"] == EXIT_BUSY
    DISK.close(fd)


def test_one_whose_server_ended_before_makes_no_snapshot(tmp_path: Path) -> None:
    write_history(tmp_path / "log")
    order = msgspec.json.encode(SnapshotOrder(20, KEEP)).decode()
    # This process starts it for another one.
    command = [*process_command("snapshotter"), str(tmp_path / "log"), order, str(os.getppid())]
    ended = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, snapshot_paths(tmp_path / "log")) == (EXIT_FAILED, [])
    assert b"has ended" in ended.stderr


def test_one_that_hangs_is_killed(
    process: SnapshotProcess, reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_process, "SNAPSHOT_S_MAX", -1.0)
    monkeypatch.setattr(
        snapshot_process.subprocess, "Popen", lambda _, **o: _popen(["/bin/sleep", "1000"], **o)
    )
    process.tick(20)
    process.tick(20)
    assert reports[0][0] == "the snapshotter hangs and is killed"
    assert process._process is None


def test_one_that_is_stopped_is_given_up_and_another_makes_the_snapshot(
    process: SnapshotProcess, reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process.tick(20)
    stopped = process._process
    assert stopped is not None
    stopped.send_signal(signal.SIGSTOP)
    # It is waited for within the bound, and no second one is started.
    process.tick(60)
    assert process._process is stopped
    assert reports == []
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_process, "SNAPSHOT_S_MAX", -1.0)
        process.tick(60)
    assert stopped.returncode == -signal.SIGKILL
    assert reports[0][0] == "the snapshotter hangs and is killed"
    ticked(process, 60, reports, 2)
    assert reports[1][0] == "snapshot made"


_popen = subprocess.Popen


def test_a_long_result_does_not_fill_a_pipe(
    process: SnapshotProcess, reports: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # That number of files may be removed at once after another retention was set.
    removed = tuple(f"/log/{number:020}.log" for number in range(10_000))
    result = tmp_path / "result.json"
    result.write_bytes(msgspec.json.encode(SnapshotMade(20, 1, 1, 1, 0, 20, removed)))
    monkeypatch.setattr(
        snapshot_process, "process_command", lambda _: ["sh", "-c", f"cat {result}"]
    )
    ticked(process, 20, reports)
    assert reports[0][1]["removed"] == len(removed)


def test_one_that_can_not_be_started_is_reported(
    process: SnapshotProcess, reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        snapshot_process, "process_command", lambda name: ["/no/such/program", name]
    )
    process.tick(20)
    assert reports[0][0] == "a snapshot can't be made"
    assert process._process is None


def test_at_the_end_a_snapshot_is_made_if_many_inputs_were_handled(
    process: SnapshotProcess, reports: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_process, "STOP_S_MAX", 60.0)
    process.finish(3)
    assert reports == []
    process.finish(10)
    assert reports[0][1]["seq"] == 10
