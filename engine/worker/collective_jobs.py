"""Jobs that complete once every rank has completed them.

A job that failed on one rank fails on all. Every rank decides from the outcomes of all ranks, so
that all see the same jobs end in the same order with the same error.

Every method but `close` is collective: all ranks call it in the same order, each on one thread.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from loradock.engine.errors import Conflict, code_of, details_of, error_of, text_of
from loradock.engine.jobs import FinishedJob, Jobs
from loradock.engine.parallel import ParallelGroup
from loradock.messages.errors import ErrorCode
from loradock.messages.views import Details

T = TypeVar("T")


class Outcome(Struct, frozen=True, array_like=True):
    """Outcome of a job on one rank: `code` and `text` of its error, or its result's `stamp`."""

    number: int
    code: ErrorCode | None = None
    text: str = ""
    stamp: str = ""
    details: Details = ()


_OUTCOMES = msgspec.msgpack.Decoder(list[Outcome])


class CollectiveJobs(Generic[T]):
    """Jobs that every rank starts in the same order; one has ended once all ranks ended it.

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
