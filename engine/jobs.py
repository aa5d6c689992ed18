"""Background jobs (file reads, checks, packing), on threads, inline, or on several ranks.

A job gets all it needs as arguments and returns its result. Only the main thread, which calls
`take_finished`, may change the engine. Jobs run next to forward passes, so each of their threads
computes alone: with several, PyTorch would start a team of threads for each of them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from msgspec import Struct

from loradock.engine.errors import Conflict, code_of, details_of, error_of, text_of
from loradock.engine.parallel import ParallelGroup
from loradock.messages.errors import ErrorCode

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


class Outcome(Struct, frozen=True, array_like=True):
    """Outcome of a job on one rank: `code` and `text` of its error, or its result's `stamp`."""

    number: int
    code: ErrorCode | None = None
    text: str = ""
    stamp: str = ""
    details: tuple[str, ...] = ()


_OUTCOMES = msgspec.msgpack.Decoder(list[Outcome])


class CollectiveJobs(Generic[T]):
    """Jobs that every rank starts in the same order; one has ended once all ranks ended it.

    A job that failed on one rank fails on all. Every rank decides from the outcomes of all ranks,
    so that all see the same jobs end in the same order with the same error. Every method but
    `close` is collective: all ranks call it in the same order, each on one thread.

    `stamp_of` identifies what a result was made from. A job whose stamps differ between ranks has
    failed: its files were replaced between two reads.
    """

    def __init__(
        self, jobs: Jobs[int], group: ParallelGroup, stamp_of: Callable[[Any], str]
    ) -> None:
        self._jobs = jobs
        self._group = group
        self._stamp_of = stamp_of
        self._started = 0
        self._tags: dict[int, T] = {}
        self._own_futures: dict[int, Future[Any]] = {}
        self._outcomes_by_rank: dict[int, dict[int, Outcome]] = {}

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Start `job` on this rank."""
        self._started += 1
        self._tags[self._started] = tag
        self._jobs.start(self._started, job)

    def take_finished(self) -> list[FinishedJob[T]]:
        """Return the jobs that ended on all ranks since the last call, in start order."""
        if not self._tags:
            return []
        self._exchange()
        complete = [number for number in self._tags if self._is_complete(number)]
        return [FinishedJob(self._tags.pop(number), self._result(number)) for number in complete]

    def close(self) -> None:
        """Start no further jobs."""
        self._jobs.close()

    def _exchange(self) -> None:
        """Send this rank's new outcomes to all ranks, and receive theirs."""
        new = []
        for number, future in self._jobs.take_finished():
            self._own_futures[number] = future
            new.append(self._outcome(number, future))
        encoded = msgspec.msgpack.encode(new) if new else b""
        for rank, data in enumerate(self._group.gather_bytes(encoded)):
            for outcome in _OUTCOMES.decode(data) if data else ():
                self._outcomes_by_rank.setdefault(outcome.number, {})[rank] = outcome

    def _outcome(self, number: int, future: "Future[Any]") -> Outcome:
        error = future.exception()
        if error is not None:
            return Outcome(number, code_of(error), text_of(error), details=details_of(error))
        return Outcome(number, stamp=self._stamp_of(future.result()))

    def _is_complete(self, number: int) -> bool:
        return len(self._outcomes_by_rank.get(number, ())) == self._group.world_size

    def _result(self, number: int) -> "Future[Any]":
        """Return this rank's result, or the error of the first rank that has one."""
        own_future, by_rank = self._own_futures.pop(number), self._outcomes_by_rank.pop(number)
        outcomes = [by_rank[rank] for rank in range(self._group.world_size)]
        failed = next((rank for rank, end in enumerate(outcomes) if end.code is not None), None)
        if failed is None:
            if len({end.stamp for end in outcomes}) == 1:
                return own_future
            return _failure(Conflict("the ranks read different files; load the adapter again"))
        if failed == self._group.rank:
            return own_future
        first = outcomes[failed]
        code = first.code or ErrorCode.ENGINE_GONE
        return _failure(error_of(code, first.text, details=first.details))


def _failure(error: Exception) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
