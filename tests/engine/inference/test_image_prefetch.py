"""Images are read in their order, few at a time, while the engine goes on and is woken."""

import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.inference.image_prefetch import AHEAD_MAX, PromptJobs
from engine.jobs import Finished
from engine.models.causal_model import PreparedModel
from engine.models.image_processor import Reading
from engine.models.loading import load_model
from engine.models.vision.media import Media
from engine.worker.engine import Engine
from messages.commands import StartGeneration, StopGeneration
from messages.ids import OpId
from messages.reports import GenerationEnded, Report
from messages.requests import IllustratedPrompt, Sampling
from tests.support.engine.image_bench import LORA
from tests.support.models.image_examples import build_with_processor, illustrated, picture

WAIT_S = 60
PROMPT = illustrated("qwen2_vl", "a @ cat", picture(20, 12, 1))


class Bench:
    """An engine whose images are read when `may_read` is set."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build_with_processor("qwen2_vl", directory)
        config = EngineConfig(directory, device="cpu", device_bytes_max=1 << 20)
        model = load_model(config, LORA)
        assert isinstance(model, PreparedModel)
        assert model.reader is not None, model.without_images
        self.model, self.may_read, self.woken = model, threading.Event(), threading.Event()
        read = model.reader.read

        def late(prompt: IllustratedPrompt, wanted: int) -> Reading:
            assert self.may_read.wait(WAIT_S)
            return read(prompt, wanted)

        monkeypatch.setattr(model.reader, "read", late)
        self.engine = Engine(model, config, LORA, "e" * 32, self.woken.set)
        self.reports: list[Report] = []

    def start(self, op: int) -> None:
        sampling = Sampling(max_tokens=3)
        self.engine.submit(StartGeneration(op, str(op), 0, -1, 0, PROMPT, sampling))

    def run(self) -> None:
        while True:
            self.reports += self.engine.poll()
            if self.engine.is_idle:
                return
            self.engine.step()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_an_engine_that_reads_is_idle_has_jobs_and_is_woken(bench: Bench) -> None:
    bench.start(1)
    bench.run()
    assert bench.engine.is_idle
    assert bench.engine.has_jobs
    assert bench.engine.inventory().running == (1,)
    assert not bench.reports
    bench.may_read.set()
    assert bench.woken.wait(WAIT_S)
    bench.run()
    (end,) = [report for report in bench.reports if isinstance(report, GenerationEnded)]
    assert (end.op, end.finish_reason) == (1, "length")
    assert not bench.engine.has_jobs
    bench.engine.close()


def test_what_is_stopped_while_it_is_read_ends_at_once(bench: Bench) -> None:
    bench.start(1)
    bench.engine.submit(StopGeneration(2, 1))
    bench.run()
    assert bench.reports == [GenerationEnded(1, "cancelled", 0, 0)]
    bench.may_read.set()
    assert bench.woken.wait(WAIT_S)
    bench.run()
    assert bench.reports == [GenerationEnded(1, "cancelled", 0, 0)]
    assert bench.engine.inventory().running == ()


def test_pixels_are_kept_until_they_are_in_the_cache(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, pixels = bench.model.forward, []

    def watched(tokens: torch.Tensor, rows: object, media: list[Media]) -> torch.Tensor:
        pixels.extend(weakref.ref(one.tensors["pixel_values"]) for one in media)
        return forward(tokens, rows, media)

    monkeypatch.setattr(bench.model, "forward", watched)
    bench.may_read.set()
    bench.start(1)
    assert bench.woken.wait(WAIT_S)
    bench.reports += bench.engine.poll()
    bench.engine.step()
    assert not bench.engine.is_idle
    assert [pixel() for pixel in pixels] == [None]


class Recorded:
    """Jobs that end when they are told to; a job's result is its tag."""

    def __init__(self) -> None:
        self.started: list[OpId] = []
        self.running: list[OpId] = []
        self._ended: list[Finished[OpId]] = []

    def start(self, tag: OpId, _job: object) -> None:
        self.started.append(tag)
        self.running.append(tag)

    def end(self, place: int) -> None:
        future: Future[OpId] = Future()
        tag = self.running.pop(place)
        future.set_result(tag)
        self._ended.append(Finished(tag, future))

    def take(self) -> list[Finished[OpId]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Nothing runs by itself."""


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_are_read_in_their_order_few_at_a_time_and_told_once(data: st.DataObject) -> None:
    jobs = Recorded()
    unread = PromptJobs(jobs)
    rows: dict[OpId, object] = {}
    dropped: set[OpId] = set()
    told: list[OpId] = []
    unused = 0
    for op in range(1, data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "end", "drop", "use", "take"])):
            case "add":
                rows[op] = SimpleNamespace(command=SimpleNamespace(op=op))
                unread.add(rows[op], lambda: None, unused)
            case "end" if jobs.running:
                jobs.end(data.draw(st.integers(0, len(jobs.running) - 1)))
            case "drop" if left := sorted(rows.keys() - dropped - set(told)):
                dropped.add(gone := data.draw(st.sampled_from(left)))
                unread.drop(rows[gone])
            case "use":
                unused = max(0, unused - 1)
            case "take":
                new = unread.take(unused)
                assert all(future.result() == row.command.op for row, future in new)
                told += [row.command.op for row, _ in new]
                unused += len(new)
        assert len(jobs.running) + unused <= max(AHEAD_MAX, unused)
        assert jobs.started == [op for op in rows if op in jobs.started]
        assert len(told) == len(set(told))
        assert dropped.isdisjoint(told)
    while unread.is_busy or len(unread):
        while jobs.running:
            jobs.end(0)
        told += [row.command.op for row, _ in unread.take(0)]
    assert set(told) == rows.keys() - dropped
