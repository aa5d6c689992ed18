"""The exit status of torchrun, derived from the statuses of its ranks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from loradock.engine.worker.torchrun import main

ROOT = Path(__file__).parents[3]


def failure(rank: int, exit_code: int, timestamp: int) -> ProcessFailure:
    ended = ProcessFailure(rank, 1000 + rank, exit_code, "<N/A>")
    ended.timestamp = timestamp
    return ended


def status_after(error: Exception | None) -> int:
    def launch() -> None:
        if error is not None:
            raise error

    return main(launch)


def test_success_and_a_signal_are_no_failure() -> None:
    assert status_after(None) == 0
    assert status_after(SignalException("ended", signal.SIGTERM)) == 0


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (2, 1, 2),
        (1, -signal.SIGTERM, 1),
        (1, -signal.SIGKILL, -signal.SIGKILL),
        (-signal.SIGKILL, 1, -signal.SIGKILL),
        (-signal.SIGSEGV, -signal.SIGTERM, -signal.SIGSEGV),
    ],
)
def test_the_status_is_that_of_the_rank_that_ended_first(
    first: int, second: int, status: int
) -> None:
    failures = {1: failure(1, first, 10), 0: failure(0, second, 11)}
    assert status_after(ChildFailedError("engine", failures)) == status


@pytest.mark.parametrize("status", [0, 2, -signal.SIGKILL, -signal.SIGTERM])
def test_the_process_ends_with_the_status_of_its_rank(status: int) -> None:
    program = f"from loradock.engine.worker.torchrun import end; end({status})"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert ended.returncode == status
