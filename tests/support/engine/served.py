"""`loradock serve` as a process, for tests: started, looked at, and gone when its context ends."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.client import Client
from messages.requests import StatusShown
from tests.support.parallel.processes import ROOT, TINY

WAIT_S = 60


@contextmanager
def serve(
    directory: Path, *options: str, model: Path = TINY / "model"
) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", "from controller.cli.main import app; app()"]
    command += ["--dir", str(directory), "serve", "--model", str(model)]
    command += ["--adapter-root", str(TINY / "adapters"), *options]
    with directory.with_suffix(".log").open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=errors, stderr=errors)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def status_once(directory: Path, ready: Callable[[StatusShown], bool]) -> StatusShown:
    """The first status that is as wanted."""
    deadline = time.monotonic() + WAIT_S
    with Client(directory, timeout_s=WAIT_S) as client:
        while True:
            status = client.status()
            if ready(status):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
