"""`loradock serve` as a process for tests; it ends with its context."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from loradock.client import Client
from loradock.messages.requests import StatusShown
from tests.support.parallel.processes import ROOT, TINY
from tests.support.waiting import HANG_S, wait_until


@contextmanager
def serve(
    directory: Path, *options: str, model: Path = TINY / "model", prelude: str = ""
) -> Iterator[subprocess.Popen]:
    """`prelude`: code that the process runs first."""
    command = [sys.executable, "-c", f"{prelude}\nfrom loradock.cli.main import app; app()"]
    command += ["--dir", str(directory), "serve", "--model", str(model)]
    command += ["--adapter-root", str(TINY / "adapters"), *options]
    with directory.with_suffix(".log").open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=errors, stderr=errors)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def gateway_url(directory: Path) -> str:
    """Return the address that the server's gateway logged last; empty before."""
    lines = directory.with_suffix(".log").read_text().splitlines()
    found = [line for line in lines if "the gateway serves" in line]
    return found[-1].partition("url=")[2].strip() if found else ""


def wait_for_gateway(directory: Path) -> str:
    """Return the address of the server's gateway once it serves and an engine is attached."""
    size = directory.with_suffix(".log").stat
    url = wait_until(lambda: gateway_url(directory), lambda: size().st_size)
    wait_until(lambda: httpx.get(f"{url}health").status_code == 200, lambda: size().st_size)
    return url


def status_once(directory: Path, ready: Callable[[StatusShown], bool]) -> StatusShown:
    """Return the first status that is `ready`; waits as long as processes come up or log."""
    latest: list[StatusShown] = []

    with Client(directory, timeout_s=HANG_S) as client:

        def is_ready() -> bool:
            latest[:] = [client.status()]
            return ready(latest[0])

        wait_until(is_ready, lambda: _progress(directory, latest), f"status of {directory}")
    return latest[0]


def _progress(directory: Path, latest: list[StatusShown]) -> tuple[object, ...]:
    """Return which processes serve, and the size of their log."""
    size_bytes = directory.with_suffix(".log").stat().st_size
    return size_bytes, *((s.epoch, s.controller_pid, s.engine_id, s.engine_pid) for s in latest)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def wait_for_end(*pids: int) -> None:
    """Wait until none of these processes is alive."""

    def alive() -> list[int]:
        return [pid for pid in pids if is_alive(pid)]

    wait_until(lambda: not alive(), alive, f"end of {pids}")
