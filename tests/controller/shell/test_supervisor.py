"""`loradock serve`: children come back, signals end them all, and nothing outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.cli.exit_codes import ExitCode
from tests.support.engine.served import WAIT_S, serve, status_once, wait_for_end
from tests.support.parallel.processes import ROOT


def test_both_children_come_back_and_a_signal_ends_all(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory) as process:
        first = status_once(directory, lambda status: bool(status.engine_id))
        os.kill(first.controller_pid, signal.SIGKILL)
        second = status_once(
            directory, lambda status: status.epoch > first.epoch and bool(status.engine_id)
        )
        assert second.engine_id == first.engine_id
        os.kill(second.engine_pid, signal.SIGKILL)
        third = status_once(directory, lambda status: status.engine_id not in ("", first.engine_id))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        wait_for_end(third.controller_pid, third.engine_pid)


def test_children_see_their_parent_die(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory) as process:
        status = status_once(directory, lambda status: bool(status.engine_id))
        process.kill()
        wait_for_end(status.controller_pid, status.engine_pid)


def test_a_damaged_log_ends_it_for_good(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory, "--engine", "external") as process:
        status_once(directory, lambda status: status.seq > 0)
        process.terminate()
        process.wait(WAIT_S)
    (segment,) = (directory / "log").iterdir()
    damaged = bytearray(segment.read_bytes())
    damaged[200] ^= 1
    segment.write_bytes(bytes(damaged))
    with serve(directory, "--engine", "external") as process:
        assert process.wait(WAIT_S) == ExitCode.LOG
    assert str(segment) in directory.with_suffix(".log").read_text()


@pytest.mark.parametrize("model", [Path("/nowhere"), ROOT / "tests"])
def test_a_model_that_is_none_ends_it(tmp_path: Path, model: Path) -> None:
    with serve(tmp_path / "d", model=model) as process:
        assert process.wait(WAIT_S) == ExitCode.USAGE
    assert f"directory={model}" in (tmp_path / "d.log").read_text()


FAMILY = """
import os, sys
from pathlib import Path
from controller.shell import stderr_logging
from controller.shell.supervisor import Child, Supervisor

stderr_logging.configure()
note = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'));"
steady = [sys.executable, "-c", note + "time.sleep(600)", sys.argv[1] + "/steady"]
broken = [sys.executable, "-c", note + sys.argv[2], sys.argv[1] + "/broken"]
children = [Child("steady", steady), Child("broken", broken)]
sys.exit(Supervisor(children, os.pipe()[0]).run())
"""


@contextmanager
def family(directory: Path, broken: str) -> Iterator[subprocess.Popen]:
    """A supervisor of one child that sleeps and one that does what it is told."""
    command = [sys.executable, "-c", FAMILY, str(directory), broken]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lives(directory: Path, child: str) -> list[int]:
    path = directory / child
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize(
    ("broken", "starts", "status"),
    [
        ("sys.exit(1)", 3, 1),
        ("raise ValueError", 3, 1),
        ("os.abort()", 3, 1),
        ("sys.exit(2)", 1, 2),
        ("sys.exit(6)", 1, 6),
        ("sys.exit(7)", 1, 7),
    ],
)
def test_a_child_that_can_not_run_ends_them_all(
    tmp_path: Path, broken: str, starts: int, status: int
) -> None:
    with family(tmp_path, broken) as process:
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == status
    last = said.decode().splitlines()[-1]
    assert "a child can't run" in last
    assert "broken" in last
    assert len(lives(tmp_path, "broken")) == starts
    wait_for_end(*lives(tmp_path, "steady"))


@pytest.mark.parametrize("broken", ["os.kill(os.getpid(), 9)", "sys.exit(0)"])
def test_a_child_that_somebody_ends_always_comes_back(tmp_path: Path, broken: str) -> None:
    with family(tmp_path, broken) as process:
        deadline = time.monotonic() + WAIT_S
        while len(lives(tmp_path, "broken")) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(lives(tmp_path, "steady")) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    wait_for_end(*lives(tmp_path, "steady"))
