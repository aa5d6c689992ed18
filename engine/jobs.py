"""Background jobs (file reads, checks, packing), on threads or inline.

A job gets all it needs as arguments and returns its result. Only the main thread, which calls
`take_finished`, may change the engine. Jobs run next to forward passes, so each of their threads
computes alone: with several, PyTorch would start a team of threads for each of them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")


class FinishedJob(NamedTuple, Generic[T]):
    """The tag that a job was started with, and its result or error."""

    tag: T
    future: "Future[Any]"


class Jobs(Protocol[T]):
    """Runs jobs, at any time after `start`."""

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Start `job`, now or later."""
        ...

    def take_finished(self) -> list[FinishedJob[T]]:
        """Return the jobs that have ended since the last call, in the order of their end."""
        ...

    def close(self) -> None:
        """Start no further jobs."""
        ...


class InlineJobs(Generic[T]):
    """Runs every job in the calling thread, within `start`."""

    def __init__(self) -> None:
        self._finished: list[FinishedJob[T]] = []

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Run `job`; its exception becomes its result, as on another thread."""
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            # Of any kind: it is raised where the result is used, as with a thread.
            future.set_exception(error)
        self._finished.append(FinishedJob(tag, future))

    def take_finished(self) -> list[FinishedJob[T]]:
        """Return the jobs that have ended since the last call, in the order of their end."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Do nothing: no job runs between calls."""


class ThreadedJobs(Generic[T]):
    """Runs jobs on `threads` threads; each calls `wake` when its job has ended."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix="engine-jobs", initializer=compute_alone
        )
        self._finished: SimpleQueue[FinishedJob[T]] = SimpleQueue()
        self._wake = wake

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Run `job` as soon as a thread is free."""

        def report(future: "Future[Any]") -> None:
            self._finished.put(FinishedJob(tag, future))
            self._wake()

        self._executor.submit(job).add_done_callback(report)

    def take_finished(self) -> list[FinishedJob[T]]:
        """Return the jobs that have ended since the last call, in the order of their end."""
        finished = []
        while True:
            try:
                finished.append(self._finished.get_nowait())
            except Empty:
                return finished

    def close(self) -> None:
        """Start no further jobs; a running job continues to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def compute_alone() -> None:
    """Let PyTorch use one thread for what the calling thread computes, and change no other's."""
    with _setting:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        # Each thread has the setting, but a new thread begins with the last one of any
        # thread: one that ends at once sets that back.
        last = Thread(target=torch.set_num_threads, args=(before,))
        last.start()
        last.join()


_setting: Final = Lock()
"""A second thread that reads the setting between the two changes would keep the 1 for all."""
