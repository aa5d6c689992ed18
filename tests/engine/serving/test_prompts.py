"""Preparation of prompts: structures apart from prompts, and clients in turns."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from loradock.engine.jobs import FinishedJob
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.serving.prompts import PREFETCHED_MAX, Preparation, PromptPrefetcher
from loradock.engine.serving.sequence import PreparedPrompt
from loradock.messages.commands import StartGeneration

GRAMMAR: Any = SimpleNamespace(error="")


class ManualJobs:
    """Jobs that end when the test says so, in any order."""

    def __init__(self) -> None:
        self.running: dict[int, Callable[[], Any]] = {}
        self.started: list[int] = []
        self._finished: list[FinishedJob[int]] = []

    def start(self, tag: int, job: Callable[[], Any]) -> None:
        self.running[tag] = job
        self.started.append(tag)

    def end(self, tag: int) -> None:
        future: Future[Any] = Future()
        try:
            future.set_result(self.running.pop(tag)())
        except ValueError as error:
            future.set_exception(error)
        self._finished.append(FinishedJob(tag, future))

    def take_finished(self) -> list[FinishedJob[int]]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Do nothing."""


class Bench:
    """A prefetcher, its jobs, and what it has prepared."""

    def __init__(self) -> None:
        self.jobs = ManualJobs()
        self.prefetcher = PromptPrefetcher(self.jobs)
        self.prepared: dict[int, Future[PreparedPrompt]] = {}
        self._op = 0

    def add(self, client: str, *, structure: bool = False, is_long: bool = True) -> int:
        self._op += 1
        command = StartGeneration(self._op, f"{client}:{self._op}", 0, -1, 0, "a text")
        sequence: Any = SimpleNamespace(command=command, owner=(0, client))
        compile_ = (lambda: GRAMMAR) if structure else None
        read = lambda: ProcessedPrompt([1], None)  # noqa: E731
        self.prefetcher.add(sequence, Preparation(read, is_long, compile_), ready=0)
        return self._op

    def end(self, op: int) -> None:
        self.jobs.end(op)
        for sequence, future in self.prefetcher.collect(ready=0):
            self.prepared[sequence.command.op] = future


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_prompts_do_not_wait_for_structures(bench: Bench) -> None:
    """However many structures wait, one is compiled at a time, and prompts have their places."""
    structures = [bench.add("slow", structure=True) for _ in range(2 * PREFETCHED_MAX)]
    prompts = [bench.add("other") for _ in range(PREFETCHED_MAX)]
    assert set(bench.jobs.running) == {structures[0], *prompts}
    for op in prompts:
        bench.end(op)
    assert [bench.prepared[op].result() for op in prompts] == [
        PreparedPrompt(ProcessedPrompt([1], None))
    ] * len(prompts)


@pytest.mark.parametrize("is_long", [True, False])
def test_a_prompt_is_read_after_its_structure(is_long: bool, bench: Bench) -> None:
    op = bench.add("a", structure=True, is_long=is_long)
    bench.end(op)
    assert (op in bench.prepared) == (not is_long)
    if is_long:
        bench.end(op)
    assert bench.prepared[op].result().grammar is GRAMMAR
    assert not len(bench.prefetcher)


def test_clients_take_turns(bench: Bench) -> None:
    """The flood of one client delays another one by the jobs that run."""
    flood = [bench.add("a", structure=True) for _ in range(20)]
    other = bench.add("b", structure=True)
    assert bench.prefetcher.clients == {"a": 20, "b": 1}
    bench.end(flood[0])
    bench.end(next(op for op in bench.jobs.running if op != flood[0]))
    assert other in bench.jobs.started


def test_a_cancelled_sequence_is_not_prepared(bench: Bench) -> None:
    running, queued = bench.add("a", structure=True), bench.add("a", structure=True)
    for op in (queued, running):
        sequence: Any = SimpleNamespace(command=SimpleNamespace(op=op), owner=(0, "a"))
        bench.prefetcher.cancel(sequence)
    assert bench.prefetcher.clients == {}
    bench.end(running)
    assert (bench.prepared, len(bench.prefetcher)) == ({}, 0)
