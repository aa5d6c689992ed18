"""Images are processed in order, a bounded number at a time, while the engine is not blocked."""

import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.config import EngineConfig
from loradock.engine.jobs import FinishedJob
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.models.loading import load_model
from loradock.engine.models.vision.image_inputs import ImageInputs
from loradock.engine.serving.prompts import PREFETCHED_MAX, PromptPrefetcher
from loradock.engine.worker.engine import Engine
from loradock.messages.commands import StartGeneration, StopGeneration
from loradock.messages.ids import OpId
from loradock.messages.prompts import IllustratedPrompt, Sampling
from loradock.messages.reports import GenerationEnded, Report
from loradock.messages.requests import TokensStreamed
from tests.support.engine.image_bench import LORA
from tests.support.models.image_examples import build_with_processor, image_prompt, picture
from tests.support.waiting import HANG_S

PROMPT = image_prompt("qwen2_vl", "a @ cat", picture(20, 12, 1))


class PrefetchBench:
    """An engine whose images are processed once `may_read` is set."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        build_with_processor("qwen2_vl", directory)
        config = EngineConfig(directory, device="cpu", device_bytes_max=1 << 20)
        model = load_model(config, LORA)
        assert isinstance(model, CausalModel)
        assert model.prompt_reader is not None, model.no_images_reason
        self.model, self.may_read, self.woken = model, threading.Event(), threading.Event()
        read = model.prompt_reader.read

        def late(prompt: IllustratedPrompt, wanted: int) -> ProcessedPrompt:
            assert self.may_read.wait(HANG_S)
            return read(prompt, wanted)

        monkeypatch.setattr(model.prompt_reader, "read", late)
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
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrefetchBench:
    return PrefetchBench(tmp_path, monkeypatch)


def test_an_engine_that_processes_images_is_idle_has_jobs_and_is_woken(
    bench: PrefetchBench,
) -> None:
    bench.start(1)
    bench.run()
    assert bench.engine.is_idle
    assert bench.engine.has_jobs
    assert bench.engine.inventory().running == (1,)
    assert not bench.reports
    bench.may_read.set()
    assert bench.woken.wait(HANG_S)
    bench.run()
    (end,) = [report for report in bench.reports if isinstance(report, GenerationEnded)]
    assert (end.op, end.finish_reason) == (1, "length")
    assert not bench.engine.has_jobs
    bench.engine.close()


def test_a_generation_stopped_during_processing_ends_at_once(bench: PrefetchBench) -> None:
    bench.start(1)
    bench.engine.submit(StopGeneration(2, 1))
    bench.run()
    ended = [
        TokensStreamed("1", 0, (), finish_reason="cancelled"),
        GenerationEnded(1, "cancelled", 0, 0),
    ]
    assert bench.reports == ended
    bench.may_read.set()
    assert bench.woken.wait(HANG_S)
    bench.run()
    assert bench.reports == ended
    assert bench.engine.inventory().running == ()


def test_pixels_are_released_once_they_are_in_the_cache(
    bench: PrefetchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, pixels = bench.model.forward, []

    def watched(tokens: torch.Tensor, rows: object, images: list[ImageInputs]) -> torch.Tensor:
        pixels.extend(weakref.ref(one.tensors["pixel_values"]) for one in images)
        return forward(tokens, rows, images)

    monkeypatch.setattr(bench.model, "forward", watched)
    bench.may_read.set()
    bench.start(1)
    assert bench.woken.wait(HANG_S)
    bench.reports += bench.engine.poll()
    bench.engine.step()
    assert not bench.engine.is_idle
    assert [pixel() for pixel in pixels] == [None]


class ManualJobs:
    """Jobs that end when the test calls `end`; a job's result is its tag."""

    def __init__(self) -> None:
        self.started: list[OpId] = []
        self.running: list[OpId] = []
        self._ended: list[FinishedJob[OpId]] = []

    def start(self, tag: OpId, _job: object) -> None:
        self.started.append(tag)
        self.running.append(tag)

    def end(self, index: int) -> None:
        future: Future[OpId] = Future()
        tag = self.running.pop(index)
        future.set_result(tag)
        self._ended.append(FinishedJob(tag, future))

    def take_finished(self) -> list[FinishedJob[OpId]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Do nothing: no job runs on a thread."""


@settings(max_examples=150)
@given(st.data())
def test_sequences_are_processed_in_order_within_the_bound_and_returned_once(
    data: st.DataObject,
) -> None:
    jobs = ManualJobs()
    prefetcher = PromptPrefetcher(jobs)
    sequences: dict[OpId, object] = {}
    cancelled: set[OpId] = set()
    collected: list[OpId] = []
    ready = 0
    for op in range(1, data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add", "add", "end", "cancel", "use", "collect"])):
            case "add":
                sequences[op] = SimpleNamespace(command=SimpleNamespace(op=op))
                prefetcher.add(sequences[op], lambda: None, ready)
            case "end" if jobs.running:
                jobs.end(data.draw(st.integers(0, len(jobs.running) - 1)))
            case "cancel" if left := sorted(sequences.keys() - cancelled - set(collected)):
                cancelled.add(gone := data.draw(st.sampled_from(left)))
                prefetcher.cancel(sequences[gone])
            case "use":
                ready = max(0, ready - 1)
            case "collect":
                new = prefetcher.collect(ready)
                assert all(future.result() == one.command.op for one, future in new)
                collected += [one.command.op for one, _ in new]
                ready += len(new)
        assert len(jobs.running) + ready <= max(PREFETCHED_MAX, ready)
        assert jobs.started == [op for op in sequences if op in jobs.started]
        assert len(collected) == len(set(collected))
        assert cancelled.isdisjoint(collected)
    while prefetcher.is_busy or len(prefetcher):
        while jobs.running:
            jobs.end(0)
        collected += [one.command.op for one, _ in prefetcher.collect(0)]
    assert set(collected) == sequences.keys() - cancelled
