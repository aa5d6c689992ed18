"""What ends at different times on different ranks ends on all of them at once, and alike."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.errors import AdapterNotFound, Conflict, EngineError, code_of
from engine.jobs import Finished
from engine.residency.collective_copier import AgreedCopier
from engine.worker.collective_jobs import AgreedJobs
from engine.worker.leader import Books
from messages import reports as rp
from messages.errors import ErrorCode

RANKS = 3
WAIT_S = 10


class SharedGroup:
    """A group whose ranks are threads: what each brings to a call is laid on one table."""

    def __init__(self, rank: int, table: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, RANKS
        self._table, self._barrier = table, barrier

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._exchange(data)

    def all_true(self, claim: bool) -> bool:
        return all(self._exchange(claim))

    def _exchange(self, mine: Any) -> list[Any]:
        self._table[self.rank] = mine
        self._barrier.wait(WAIT_S)
        found = [self._table[rank] for rank in range(RANKS)]
        self._barrier.wait(WAIT_S)
        return found


class HandEnded:
    """Jobs and copies that end when a test says so."""

    def __init__(self) -> None:
        self.ended: list[Finished[int]] = []
        self.closed = False

    def start(self, tag: Any, job: Any) -> "HandEnded":
        return self

    def end(self, number: int, result: object) -> None:
        future: Future[Any] = Future()
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        self.ended.append(Finished(number, future))

    def take(self) -> list[Finished[int]]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.closed = True


def on_all(act: Callable[[SharedGroup], Any]) -> list[Any]:
    """What each rank's thread found."""
    table: dict[int, Any] = {}
    barrier = threading.Barrier(RANKS)
    groups = [SharedGroup(rank, table, barrier) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(act, groups))


def taken(jobs: AgreedJobs[str]) -> list[tuple[str, object]]:
    """What a look has found: a tag with its result, or with its error's code and text."""
    found: list[tuple[str, object]] = []
    for tag, future in jobs.take():
        error = future.exception()
        told = (code_of(error), str(error)) if error else future.result()
        found.append((tag, told))
    return found


def test_a_job_has_ended_when_it_has_on_all_ranks() -> None:
    def act(group: SharedGroup) -> list[Any]:
        own = HandEnded()
        jobs: AgreedJobs[str] = AgreedJobs(own, group, lambda result: "")
        for tag in ("a", "b"):
            jobs.start(tag, lambda: None)
        looks = [taken(jobs)]
        # The second ends first everywhere but on the last rank, where both end late.
        if group.rank < RANKS - 1:
            own.end(2, f"b{group.rank}")
        looks.append(taken(jobs))
        if group.rank == RANKS - 1:
            own.end(2, f"b{group.rank}")
        own.end(1, f"a{group.rank}")
        looks.append(taken(jobs))
        # With nothing under way nobody is asked, so that an idle rank need not answer.
        return [*looks, taken(jobs) if group.rank == 0 else []]

    for rank, looks in enumerate(on_all(act)):
        assert looks == [[], [], [("a", f"a{rank}"), ("b", f"b{rank}")], []]


@pytest.mark.parametrize("failing", [{1}, {0, 2}, {0, 1, 2}])
def test_what_failed_on_one_rank_failed_alike_on_all(failing: set[int]) -> None:
    def act(group: SharedGroup) -> list[tuple[str, object]]:
        own = HandEnded()
        jobs: AgreedJobs[str] = AgreedJobs(own, group, lambda result: "")
        jobs.start("a", lambda: None)
        error = AdapterNotFound(f"not on rank {group.rank}")
        own.end(1, error if group.rank in failing else "read")
        return taken(jobs)

    first = min(failing)
    failed = [("a", (ErrorCode.NOT_FOUND, f"not on rank {first}"))]
    assert on_all(act) == [failed] * RANKS


def test_ranks_that_read_different_files_have_read_nothing() -> None:
    def act(group: SharedGroup) -> list[tuple[str, object]]:
        own = HandEnded()
        jobs: AgreedJobs[str] = AgreedJobs(own, group, str)
        jobs.start("a", lambda: None)
        own.end(1, "old" if group.rank else "new")
        return taken(jobs)

    for ((_, (code, text)),) in on_all(act):
        assert code == Conflict.code
        assert "different files" in text


class Copy:
    """A copy that is done when told, and fails when told."""

    def __init__(self, done: bool, error: Exception | None) -> None:
        self.done, self.error = done, error

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.error:
            raise self.error

    def start(self, target: torch.Tensor, source: torch.Tensor) -> "Copy":
        return self


def test_a_copy_has_ended_when_it_has_on_all_ranks() -> None:
    def act(group: SharedGroup) -> list[bool]:
        own = Copy(group.rank > 0, None)
        copy = AgreedCopier(own, group).start(torch.empty(0), torch.empty(0))
        early = copy.is_done()
        own.done = True
        return [early, copy.is_done()]

    assert on_all(act) == [[False, True]] * RANKS


def test_a_copy_that_failed_on_one_rank_failed_on_all() -> None:
    def act(group: SharedGroup) -> tuple[ErrorCode, str]:
        own = Copy(True, Conflict("gone") if group.rank == 1 else None)
        copy = AgreedCopier(own, group).start(torch.empty(0), torch.empty(0))
        with pytest.raises(EngineError) as failed:
            copy.wait()
        return failed.value.code, str(failed.value)

    assert on_all(act) == [(Conflict.code, "gone")] * RANKS


def test_books_differ_where_operations_ended_differently() -> None:
    def books(*reports: rp.Report) -> int:
        kept = Books()
        for report in reports:
            kept.enter(report)
        return kept.digest

    done = rp.SlotReset(1)
    failed = rp.OperationFailed(1, ErrorCode.CONFLICT, "here")
    assert books(done) != books(failed)
    assert books(done, rp.SlotReset(2)) != books(rp.SlotReset(2), done)
    # Texts and private reports are no part of it: a path may differ, a token's text is rank 0's.
    assert books(failed) == books(rp.OperationFailed(1, ErrorCode.CONFLICT, "there"))
    assert books(done) == books(done, rp.TokensGenerated("r", 0, (1,), "x"))
