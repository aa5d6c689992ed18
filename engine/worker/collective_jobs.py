"""What ends at different times on different ranks counts as ended when it has on all of them.

What it is: jobs and copies as a group has them. What it is not: a vote; what failed on one rank
failed on all. One rule: every rank decides from what all have told, so all decide the same, in the
same order, and stay equal.

Every method but `close` is collective, called by the thread that makes all of a rank's calls.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from engine.errors import Conflict, code_of, error_of
from engine.jobs import Finished, Jobs
from engine.parallel import ParallelGroup
from messages.errors import ErrorCode

T = TypeVar("T")


class Outcome(Struct, frozen=True, array_like=True):
    """How a job ended on one rank; `code` None: well, and `stamp` says with what."""

    number: int
    code: ErrorCode | None = None
    text: str = ""
    stamp: str = ""


_OUTCOMES = msgspec.msgpack.Decoder(list[Outcome])


class AgreedJobs(Generic[T]):
    """Jobs that every rank starts alike; one has ended when it has on all ranks.

    `stamp_of` a result says what it was made from: where ranks have different stamps (files that
    were replaced between two reads) the job failed.
    """

    def __init__(
        self, jobs: Jobs[int], group: ParallelGroup, stamp_of: Callable[[Any], str]
    ) -> None:
        self._jobs = jobs
        self._group = group
        self._stamp_of = stamp_of
        self._started = 0
        self._tags: dict[int, T] = {}
        self._mine: dict[int, Future[Any]] = {}
        self._told: dict[int, dict[int, Outcome]] = {}

    def start(self, tag: T, job: Callable[[], Any]) -> None:
        """Have `job` done on this rank."""
        self._started += 1
        self._tags[self._started] = tag
        self._jobs.start(self._started, job)

    def take(self) -> list[Finished[T]]:
        """The jobs that have ended on all ranks since the last call, as they were started."""
        if not self._tags:
            return []
        self._exchange()
        complete = [number for number in self._tags if self._is_complete(number)]
        return [Finished(self._tags.pop(number), self._result(number)) for number in complete]

    def close(self) -> None:
        """Start nothing more."""
        self._jobs.close()

    def _exchange(self) -> None:
        """Tell what has ended here, and hear what has elsewhere."""
        news = []
        for number, future in self._jobs.take():
            self._mine[number] = future
            news.append(self._outcome(number, future))
        told = msgspec.msgpack.encode(news) if news else b""
        for rank, data in enumerate(self._group.gather_bytes(told)):
            for outcome in _OUTCOMES.decode(data) if data else ():
                self._told.setdefault(outcome.number, {})[rank] = outcome

    def _outcome(self, number: int, future: "Future[Any]") -> Outcome:
        error = future.exception()
        if error is not None:
            return Outcome(number, code_of(error), str(error))
        return Outcome(number, stamp=self._stamp_of(future.result()))

    def _is_complete(self, number: int) -> bool:
        return len(self._told.get(number, ())) == self._group.world_size

    def _result(self, number: int) -> "Future[Any]":
        """This rank's own result; an error where any rank has one, the first of them."""
        mine, told = self._mine.pop(number), self._told.pop(number)
        outcomes = [told[rank] for rank in range(self._group.world_size)]
        failed = next((rank for rank, end in enumerate(outcomes) if end.code is not None), None)
        if failed is None:
            if len({end.stamp for end in outcomes}) == 1:
                return mine
            return _failure(Conflict("the ranks read different files; load the adapter again"))
        if failed == self._group.rank:
            return mine
        first = outcomes[failed]
        return _failure(error_of(first.code or ErrorCode.ENGINE_GONE, first.text))


def _failure(error: Exception) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
