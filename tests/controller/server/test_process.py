"""The start and the end of a controller process: its options, its parent, its exit statuses."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.controller.log.format import LogSyncFailed
from loradock.controller.log.segments import verify
from loradock.controller.server import process as controller_process
from loradock.controller.server.config import ServerConfig, Supervision
from loradock.processes.subprocesses import EXIT_CONFIG, EXIT_FAILED, EXIT_SOCKET
from tests.support.parallel.processes import LIMITS, ROOT
from tests.support.simulation.shell_examples import RawClient
from tests.support.waiting import HANG_S


def start(*arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "loradock.controller.server.process", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


def test_the_controller_ends_with_its_parent(directory: Path) -> None:
    parent, child = os.pipe()
    config = ServerConfig(str(directory), LIMITS, supervision=Supervision(parent))
    process = start(msgspec.json.encode(config).decode(), pass_fds=(parent,))
    os.close(parent)
    try:
        with RawClient(directory) as client:
            assert client.status().controller_pid == process.pid
            # Only the parent reacts to a terminal's Ctrl-C.
            process.send_signal(signal.SIGINT)
            assert client.status().seq
        os.close(child)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
    assert verify(directory / "log").torn_bytes == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "nobody"},
        {"limits": {"slots_max": 0}},
        {"limits": {"slots_max": 3, "host_adapters_max": 2}},
        {"sync": "sometimes"},
        {"snapshot_interval": 0},
        {"default_mm_loras": {"audio": "a"}},
        {"default_mm_loras": {"image": ""}},
    ],
)
def test_wrong_options_create_no_file(directory: Path, changes: dict[str, Any]) -> None:
    config = {"directory": str(directory), **changes}
    process = start(msgspec.json.encode(config).decode())
    _, output = process.communicate(timeout=HANG_S)
    assert process.returncode == EXIT_CONFIG, output
    assert b"wrong configuration" in output
    assert list(directory.iterdir()) == []


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    process = start(msgspec.json.encode(ServerConfig(str(directory))).decode())
    _, output = process.communicate(timeout=HANG_S)
    assert process.returncode == EXIT_SOCKET, output
    assert b"use a shorter directory" in output


def test_a_failed_disk_allows_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LogSyncFailed("a sync failed")

    monkeypatch.setattr(controller_process, "_serve", fail)
    monkeypatch.setattr(sys, "argv", ["process", '{"directory": "d"}'])
    assert controller_process.main() == EXIT_FAILED
