"""What takes long and touches no device: reading, checking and packing.

What it is: a small thread pool whose results are collected by the main thread, and the same without
threads. What it is not: a place for decisions. One rule: a job gets what it needs as arguments and
returns its result; only the main thread changes the engine, in `take`'s caller.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Finished(NamedTuple, Generic[T]):
    """A job's end: the tag that it was started with, and its result or error."""

    tag: T
    future: "Future[Any]"


class Jobs(Protocol[T]):
    """Does jobs, whenever that may be."""

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Have `job` done."""
        ...

    def take(self) -> list[Finished[T]]:
        """The jobs that have ended since the last call, in that order."""
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class InlineJobs(Generic[T]):
    """Does every job at once, in the thread that asks for it."""

    def __init__(self) -> None:
        self._finished: list[Finished[T]] = []

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Do `job` now; what it raises is its result, as on another thread."""
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            # Whatever it is, it belongs to whoever takes the result, as from a thread.
            future.set_exception(error)
        self._finished.append(Finished(tag, future))

    def take(self) -> list[Finished[T]]:
        """The jobs that have ended since the last call, in that order."""
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Nothing runs."""


class WorkPool(Generic[T]):
    """Runs jobs on `threads` threads; `wake` is called from one of them when a job has ended."""

    def __init__(self, threads: int, wake: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="engine-jobs")
        self._finished: SimpleQueue[Finished[T]] = SimpleQueue()
        self._wake = wake

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Run `job` as soon as a thread is free."""

        def hand_over(future: "Future[Any]") -> None:
            self._finished.put(Finished(tag, future))
            self._wake()

        self._executor.submit(job).add_done_callback(hand_over)

    def take(self) -> list[Finished[T]]:
        """The jobs that have ended since the last call, in that order."""
        finished = []
        while True:
            try:
                finished.append(self._finished.get_nowait())
            except Empty:
                return finished

    def close(self) -> None:
        """Start nothing more; a running job goes on to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
