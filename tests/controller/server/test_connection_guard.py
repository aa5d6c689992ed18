"""Connections are refused before the process has no descriptor left."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loradock.client import Client
from loradock.client.sockets import connection_to, unserved_reason
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.connection_guard import HIDDEN, ConnectionGuard, open_descriptors
from tests.support.parallel.processes import ROOT
from tests.support.waiting import HANG_S, wait_until

# Connects without a pause, and with more descriptors than the controller has.
FLOOD = """
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
peers = []
for number in range(60_000):
    peer = socket.socket(socket.AF_UNIX)
    peer.setblocking(False)
    try:
        peer.connect(sys.argv[1 + number % (len(sys.argv) - 1)])
        peers.append(peer)
    except OSError:
        peer.close()
    if len(peers) > most - 100:
        break
"""


def test_files_are_hidden_from_the_bound_on_until_an_eighth_is_free(tmp_path: Path) -> None:
    files, count = [tmp_path / "a", tmp_path / "b"], 0
    for path in files:
        path.touch()
    guard = ConnectionGuard(files, 80, lambda: count)
    seen = []
    for step in (*range(0, 100, 5), *range(100, 0, -5)):
        count = step
        guard.on_accepted([0] * 5)
        assert [path.exists() for path in files] == [not guard.is_hidden] * 2
        seen.append((step, guard.is_hidden))
    assert seen == [(s, s >= 80) for s in range(0, 100, 5)] + [
        (s, s > 70) for s in range(100, 0, -5)
    ]


def test_descriptors_are_counted_only_when_the_bound_could_be_reached(tmp_path: Path) -> None:
    counts = []
    guard = ConnectionGuard([tmp_path / "a"], 1000, lambda: counts.append(0) or 10 * len(counts))
    for _ in range(900):
        guard.on_accepted([0])
    assert len(counts) == 1


def test_connections_end_while_the_files_can_not_be_hidden(tmp_path: Path) -> None:
    path, count = tmp_path / "requests.sock", 80
    path.touch()
    guard = ConnectionGuard([path], 80, lambda: count)
    # No file can be renamed to it, as in a directory that has become read-only.
    hidden = path.with_name(path.name + HIDDEN)
    hidden.mkdir()
    ours, peer = socket.socketpair()
    with ours, peer, path.open() as no_connection:
        before = open_descriptors()
        guard.on_accepted([no_connection.fileno(), 1 << 20, ours.fileno()])
        assert peer.recv(1) == b""
        assert open_descriptors() == before
    assert path.exists()
    hidden.rmdir()
    count = 70
    guard.on_accepted([])
    ours, peer = socket.socketpair()
    with ours, peer:
        guard.on_accepted([ours.fileno()])
        peer.send(b"x")
        assert ours.recv(1) == b"x"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "c"


def serve(directory: Path, descriptors_max: int) -> "subprocess.Popen[bytes]":
    config = msgspec.json.encode(ServerConfig(str(directory))).decode()
    command = f'ulimit -n {descriptors_max}; exec "$0" -m loradock.controller.server.process "$1"'
    with directory.with_suffix(".log").open("ab") as errors:
        process = subprocess.Popen(
            ["sh", "-c", command, sys.executable, config], cwd=ROOT, stderr=errors, stdout=errors
        )
    wait_until((directory / "run" / "events.sock").exists)
    with Client(directory, timeout_s=HANG_S) as client:
        client.status()
    return process


def served_and_ended(directory: Path, process: "subprocess.Popen[bytes]") -> bool:
    """Whether the process still serves; it is ended."""
    with Client(directory, timeout_s=HANG_S) as client:
        wait_until(lambda: process.poll() is not None or client.status().seq)
    process.terminate()
    return process.wait(HANG_S) == 0


def test_silent_connections_do_not_end_a_process_with_few_descriptors(directory: Path) -> None:
    process = serve(directory, 256)
    path = str(directory / "run" / "requests.sock")
    peers: list[socket.socket] = []

    def connect() -> bool:
        while True:
            peer = socket.socket(socket.AF_UNIX)
            try:
                peer.connect(path)
            except OSError:
                peer.close()
                return True
            peers.append(peer)
            if process.poll() is not None or len(peers) > 256:
                return True
            if len(list(Path(f"/proc/{process.pid}/fd").iterdir())) >= 64:
                return False

    # It refuses from 64 descriptors on, and silent connections end by themselves. With few
    # descriptors the guard has to run in time: a busy machine may keep it waiting for some seconds.
    wait_until(connect, lambda: len(peers), pause_s=0.05)
    assert process.poll() is None
    assert len(peers) < 256
    assert "too many clients" in unserved_reason(connection_to(directory))
    # A silent connection ends by itself, and then others are accepted.
    assert served_and_ended(directory, process)
    for peer in peers:
        peer.close()


def test_no_burst_of_connections_ends_a_process(directory: Path) -> None:
    process = serve(directory, 4096)
    names = ("requests.sock", "events.sock", "engine.sock")
    files = [str(directory / "run" / name) for name in names]
    subprocess.run([sys.executable, "-c", FLOOD, *files], check=True, timeout=HANG_S)
    assert served_and_ended(directory, process)
    assert re.search(r"new ones are refused", directory.with_suffix(".log").read_text())
    assert set(os.listdir(directory / "run")) <= set(names)
