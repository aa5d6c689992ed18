"""How torchrun's end is told to whoever started it."""

import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.worker.torchrun import main


def failure(rank: int, exit_code: int, timestamp: int) -> ProcessFailure:
    ended = ProcessFailure(rank, 1000 + rank, exit_code, "<N/A>")
    ended.timestamp = timestamp
    return ended


def raising(error: Exception | None) -> int:
    def launch() -> None:
        if error is not None:
            raise error

    return main(launch)


def test_all_well_and_told_to_end_are_no_failure() -> None:
    assert raising(None) == 0
    assert raising(SignalException("told", signal.SIGTERM)) == 0


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
def test_the_status_is_that_of_the_rank_that_ended_all(
    first: int, second: int, status: int
) -> None:
    failures = {1: failure(1, first, 10), 0: failure(0, second, 11)}
    assert raising(ChildFailedError("engine", failures)) == status


@pytest.mark.parametrize("status", [0, 2, -signal.SIGKILL, -signal.SIGTERM])
def test_a_rank_s_end_becomes_the_process_s(status: int) -> None:
    # Only `end` is run, so that the test need not load what the ranks do.
    program = f"from engine.worker.torchrun import end; end({status})"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == status
