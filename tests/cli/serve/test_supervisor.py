"""`loradock serve` restarts its children, ends them on a signal, and they end with it."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loradock.cli.exit_codes import ExitCode
from tests.support.engine.serve_process import serve, status_once, wait_for_end
from tests.support.parallel.processes import ROOT
from tests.support.waiting import HANG_S, wait_until


def test_both_children_are_restarted_and_a_signal_ends_all(tmp_path: Path) -> None:
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
        log = directory.with_suffix(".log")
        lost = log.read_text().count("engine lost")
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        wait_for_end(third.controller_pid, third.engine_pid)
        assert log.read_text().count("engine lost") == lost, "a stop is no loss"


def test_children_end_when_their_parent_dies(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory) as process:
        status = status_once(directory, lambda status: bool(status.engine_id))
        process.kill()
        wait_for_end(status.controller_pid, status.engine_pid)


def test_a_damaged_log_ends_the_supervisor(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory, "--engine", "external") as process:
        status_once(directory, lambda status: status.seq > 0)
        process.terminate()
        process.wait(HANG_S)
    (segment,) = (directory / "log").glob("*.log")
    damaged = bytearray(segment.read_bytes())
    damaged[200] ^= 1
    segment.write_bytes(bytes(damaged))
    with serve(directory, "--engine", "external") as process:
        assert process.wait(HANG_S) == ExitCode.LOG
    assert str(segment) in directory.with_suffix(".log").read_text()


SUPERVISOR = """
import os, sys
from pathlib import Path
from loradock.processes import process_log
from loradock.cli.serve.children import Child
from loradock.cli.serve.supervisor import Supervisor

process_log.configure()
note = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'));"
steady = [sys.executable, "-c", note + "time.sleep(600)", sys.argv[1] + "/steady"]
broken = [sys.executable, "-c", note + sys.argv[2], sys.argv[1] + "/broken"]
children = [Child("steady", steady), Child("broken", broken)]
sys.exit(Supervisor(children, os.pipe()[0]).run())
"""


@contextmanager
def supervised(
    directory: Path, broken: str, program: str = SUPERVISOR
) -> Iterator[subprocess.Popen]:
    """A supervisor of a child that sleeps and one that runs the code `broken`."""
    command = [sys.executable, "-c", program, str(directory), broken]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def pids(directory: Path, child: str) -> list[int]:
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
    with supervised(tmp_path, broken) as process:
        _, output = process.communicate(timeout=HANG_S)
        assert process.returncode == status
    last = output.decode().splitlines()[-1]
    assert "a child can't run" in last
    assert "broken: see its messages above" in last
    assert len(pids(tmp_path, "broken")) == starts
    wait_for_end(*pids(tmp_path, "steady"))


HANGING = """
import os, sys
from loradock.cli.serve.children import Child
from loradock.cli.serve.supervisor import Supervisor
from loradock.processes import process_log
from loradock.processes.progress import Progress

process_log.configure()
program = (
    "import os, sys, time; from loradock.processes.progress import Progress;"
    "print(os.getpid(), file=open(sys.argv[1], 'a')); progress = Progress(sys.argv[2]);"
    "step = lambda: [progress.enter('work', float(sys.argv[3])), time.sleep(float(sys.argv[4]))];"
    "[step() for _ in iter(int, 1)]"
)
def child(name, *words):
    page = Progress.share()
    command = [sys.executable, "-c", program, sys.argv[1] + "/" + name, page.path, *words]
    return Child(name, command, page)

children = [child("steady", "600", "0.1"), child("broken", "0.2", "600")]
sys.exit(Supervisor(children, os.pipe()[0]).run())
"""


def test_a_child_whose_step_exceeds_its_bound_is_restarted(tmp_path: Path) -> None:
    with supervised(tmp_path, "", HANGING) as process:
        wait_until(
            lambda: len(pids(tmp_path, "broken")) >= 4,
            lambda: pids(tmp_path, "broken"),
            "4 starts",
        )
        assert len(pids(tmp_path, "steady")) == 1
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=HANG_S)
    assert b"step work exceeds 0.2 s" in output
    wait_for_end(*pids(tmp_path, "steady"), *pids(tmp_path, "broken"))


def test_a_stopped_child_is_restarted_and_no_other(tmp_path: Path) -> None:
    with supervised(tmp_path, "time.sleep(600)") as process:
        for starts in (1, 2):
            found = wait_until(lambda n=starts: pids(tmp_path, "broken")[n - 1 :], what="a start")
            os.kill(found[0], signal.SIGSTOP)
            wait_for_end(found[0])
        assert len(pids(tmp_path, "steady")) == 1
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=HANG_S)
    assert output.count(b"it is stopped") == 2


@pytest.mark.parametrize("broken", ["os.kill(os.getpid(), 9)", "sys.exit(0)"])
def test_a_child_that_is_ended_on_request_is_always_restarted(tmp_path: Path, broken: str) -> None:
    with supervised(tmp_path, broken) as process:
        wait_until(
            lambda: len(pids(tmp_path, "broken")) >= 5,
            lambda: pids(tmp_path, "broken"),
            "5 starts",
        )
        assert len(pids(tmp_path, "steady")) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
    wait_for_end(*pids(tmp_path, "steady"))


def test_a_child_for_which_there_is_no_room_is_started_later(tmp_path: Path) -> None:
    with supervised(tmp_path, "time.sleep(600)") as process:
        (first,) = wait_until(lambda: pids(tmp_path, "broken"), what="a start")
        wait_until(lambda: pids(tmp_path, "steady"), what="the other start")
        # Every lower number is in use, so no descriptor can be opened.
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (8, before[1]))
        os.kill(first, signal.SIGKILL)
        assert process.stderr is not None
        for line in process.stderr:
            if b"can't be started" in line:
                break
        assert len(pids(tmp_path, "broken")) == 1
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: len(pids(tmp_path, "broken")) == 2, what="the second start")
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert b"stopping" in output
    assert len(pids(tmp_path, "steady")) == 1
    wait_for_end(*pids(tmp_path, "steady"), *pids(tmp_path, "broken"))


RESTARTING = """
import os, sys
from loradock.cli.serve.children import Child
from loradock.cli.serve.supervisor import Supervisor
from loradock.processes import process_log

process_log.configure()
note = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a'));"
restarts, restart = os.pipe()
ask = "fd = int(sys.argv[2]); [os.write(fd, bytes.fromhex(line)) for line in sys.stdin]"
steady = [sys.executable, "-c", note + ask, sys.argv[1] + "/steady", str(restart)]
engine = [sys.executable, "-c", note + "time.sleep(600)", sys.argv[1] + "/broken"]
children = [Child("steady", steady, fds=(restart,)), Child("engine", engine)]
sys.exit(Supervisor(children, os.pipe()[0], restarts, children[1]).run())
"""
"""Its first child passes on what it reads, as a controller that requests restarts."""


def test_an_engine_is_restarted_when_the_controller_requests_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESTARTING, str(tmp_path), ""]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for starts in (1, 2):
            wait_until(lambda: pids(tmp_path, "steady"), what="the first child")
            found = wait_until(lambda n=starts: pids(tmp_path, "broken")[n - 1 :], what="a start")
            # Another process is not the engine's, so nothing is killed for it.
            for pid in (os.getpid(), found[0]):
                process.stdin.write(pid.to_bytes(8, "little").hex() + "\n")
            process.stdin.flush()
            wait_for_end(found[0])
        wait_until(lambda: len(pids(tmp_path, "broken")) == 3, what="the third start")
        assert len(pids(tmp_path, "steady")) == 1
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=HANG_S)
        assert output.count("at the controller's request") == 2
    finally:
        process.kill()
        process.wait()
