"""Jobs that end at different times on different ranks end alike on all of them."""

from concurrent.futures import Future
from typing import Any

import pytest

from loradock.engine.errors import AdapterNotFound, Conflict, code_of, text_of
from loradock.engine.jobs import CollectiveJobs, FinishedJob
from loradock.messages.errors import ErrorCode
from tests.support.parallel.threads import RANKS, SharedGroup, on_all_ranks


class ManualJobs:
    """Jobs that end when the test calls `end`."""

    def __init__(self) -> None:
        self.ended: list[FinishedJob[int]] = []
        self.closed = False

    def start(self, tag: Any, job: Any) -> "ManualJobs":
        return self

    def end(self, number: int, result: object) -> None:
        future: Future[Any] = Future()
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        self.ended.append(FinishedJob(number, future))

    def take_finished(self) -> list[FinishedJob[int]]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.closed = True


def take_results(jobs: CollectiveJobs[str]) -> list[tuple[str, object]]:
    """Return the tag of each ended job, with its result or its error's code and text."""
    results: list[tuple[str, object]] = []
    for tag, future in jobs.take_finished():
        error = future.exception()
        results.append((tag, (code_of(error), text_of(error)) if error else future.result()))
    return results


def test_a_job_ends_once_it_has_ended_on_all_ranks() -> None:
    def run_rank(group: SharedGroup) -> list[Any]:
        manual = ManualJobs()
        jobs: CollectiveJobs[str] = CollectiveJobs(manual, group, lambda result: "")
        for tag in ("a", "b"):
            jobs.start(tag, lambda: None)
        looks = [take_results(jobs)]
        # The second ends first everywhere but on the last rank, where both end late.
        if group.rank < RANKS - 1:
            manual.end(2, f"b{group.rank}")
        looks.append(take_results(jobs))
        if group.rank == RANKS - 1:
            manual.end(2, f"b{group.rank}")
        manual.end(1, f"a{group.rank}")
        looks.append(take_results(jobs))
        # Without running jobs no rank calls the group, so an idle rank need not answer.
        return [*looks, take_results(jobs) if group.rank == 0 else []]

    for rank, looks in enumerate(on_all_ranks(run_rank)):
        assert looks == [[], [], [("a", f"a{rank}"), ("b", f"b{rank}")], []]


@pytest.mark.parametrize("failing", [{1}, {0, 2}, {0, 1, 2}])
def test_a_job_that_fails_on_one_rank_fails_alike_on_all(failing: set[int]) -> None:
    def run_rank(group: SharedGroup) -> list[tuple[str, object]]:
        manual = ManualJobs()
        jobs: CollectiveJobs[str] = CollectiveJobs(manual, group, lambda result: "")
        jobs.start("a", lambda: None)
        error = AdapterNotFound(f"not on rank {group.rank}")
        manual.end(1, error if group.rank in failing else "read")
        return take_results(jobs)

    first = min(failing)
    failed = [("a", (ErrorCode.NOT_FOUND, f"not on rank {first}"))]
    assert on_all_ranks(run_rank) == [failed] * RANKS


def test_a_job_that_read_different_files_on_two_ranks_fails() -> None:
    def run_rank(group: SharedGroup) -> list[tuple[str, object]]:
        manual = ManualJobs()
        jobs: CollectiveJobs[str] = CollectiveJobs(manual, group, str)
        jobs.start("a", lambda: None)
        manual.end(1, "old" if group.rank else "new")
        return take_results(jobs)

    for ((_, (code, text)),) in on_all_ranks(run_rank):
        assert code == Conflict.code
        assert "different files" in text
