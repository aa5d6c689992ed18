"""Jobs compute on one thread each, and the threads of steps keep their own setting."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Semaphore

import pytest
import torch

from loradock.engine.jobs import ThreadedJobs

STEP_THREADS = 3


@pytest.fixture
def step_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(STEP_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 4])
def test_only_the_threads_of_jobs_compute_alone(step_threads: None, threads: int) -> None:
    ended = Semaphore(0)
    jobs: ThreadedJobs[int] = ThreadedJobs(threads, ended.release)
    all_run = Barrier(threads)

    def job() -> int:
        all_run.wait()
        return torch.get_num_threads()

    for number in range(threads):
        jobs.start(number, job)
    for _ in range(threads):
        ended.acquire()
    assert [one.future.result() for one in jobs.take_finished()] == [1] * threads
    jobs.close()
    assert torch.get_num_threads() == STEP_THREADS
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == STEP_THREADS
