"""Sequences with images join and leave among sequences of text, each with its adapter."""

import sys
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from loradock.engine.config import EngineConfig
from loradock.engine.errors import Conflict, Malformed, ModelRefused, Overloaded
from loradock.engine.jobs import FinishedJob
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.models.loading import load_model
from loradock.engine.punica import MappingType
from loradock.engine.serving import forward, prompts
from loradock.engine.serving.blocks import BLOCK_TOKENS
from loradock.engine.serving.prompts import PREFETCHED_MAX, Preparation, PromptPrefetcher
from loradock.engine.worker.engine import Engine
from loradock.messages.commands import StartGeneration
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import OpId
from loradock.messages.prompts import MultimodalPrompt, Sampling
from loradock.messages.reports import GenerationEnded, OperationFailed, Report
from tests.support.engine.image_bench import (
    EVERY_KIND,
    EVERYWHERE,
    LORA,
    ROWS,
    ImageBench,
    PeftReference,
    PromptRow,
)
from tests.support.models.image_examples import build_with_processor, image_prompt, picture
from tests.support.models.image_text_examples import build
from tests.support.waiting import HANG_S

TWELVE = Sampling(max_tokens=12)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sequences_that_join_later_equal_transformers(kind: str, tmp_path: Path) -> None:
    _check_joining(PeftReference(kind, tmp_path), ImageBench(kind, tmp_path))


def _check_joining(reference: PeftReference, bench: ImageBench, **fields: object) -> None:
    driver = bench.driver(max_num_seqs=4, **fields)
    ops = []
    for row in ROWS:
        ops.append(driver.start(row.adapter, bench.prompt(row), TWELVE))
        driver.run(steps=3)
    driver.run()
    for op, row in zip(ops, ROWS, strict=True):
        assert driver.output(op)[0] == reference.greedy(row, 12), row.text
        assert isinstance(end := driver.end(op), GenerationEnded)
        assert end.prompt_tokens == len(bench.read(row).tokens)


def test_the_blocks_of_images_before_a_window_are_released(tmp_path: Path) -> None:
    """Both layers of this Gemma 3 have windows, of 6 tokens."""
    reference, bench = PeftReference("gemma3", tmp_path), ImageBench("gemma3", tmp_path)
    driver, row = bench.driver(max_num_seqs=1), ROWS[2]
    op = driver.start(row.adapter, bench.prompt(row), structs.replace(TWELVE, max_tokens=40))
    driver.run(steps=32)
    [running] = driver.scheduler.batch._members
    assert running.table.released == (len(bench.read(row).tokens) + 31 - 5) // BLOCK_TOKENS > 1
    driver.run()
    assert driver.output(op)[0] == reference.greedy(row, 40)


@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_the_tokens_of_prompts_with_images_are_scored_as_by_transformers(
    kind: str, is_paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, bench = PeftReference(kind, tmp_path), ImageBench(kind, tmp_path)
    vocabulary = bench.model.vocab_size
    monkeypatch.setattr(forward, "PROMPT_LOGITS_BYTES_MAX", 5 * 4 * vocabulary)
    driver = bench.driver(paged_attention=is_paged)
    row, scored = ROWS[3], structs.replace(TWELVE, prompt_logprobs=1)
    plain, *ops = (driver.start(None, bench.prompt(row), one) for one in (TWELVE, scored, scored))
    driver.run()
    wanted = reference.prompt_logprobs(row)
    for op in ops:
        assert driver.output(op) == driver.output(plain)
        [entries] = [
            report.prompt_logprobs
            for report in driver.reports
            if getattr(report, "prompt_logprobs", ()) and report.request_id == str(op)
        ]
        assert entries[0] is None
        assert [one.token for one in entries[1:]] == bench.read(row).tokens[1:]
        found = torch.tensor([one.logprob for one in entries[1:]])
        assert torch.allclose(found, wanted, atol=1e-4)
    tokens = len(wanted) + 1
    monkeypatch.setattr(prompts, "WHOLE_LOGITS_BYTES_MAX", (tokens - 1) * 4 * vocabulary)
    long = driver.start(None, bench.prompt(row), scored)
    driver.run()
    assert isinstance(end := driver.end(long), OperationFailed)
    assert f"all its {tokens} tokens at once" in end.message


class ManualJobs:
    """Jobs that run when the test calls `run`."""

    def __init__(self) -> None:
        self.started: list[OpId] = []
        self.queued: list[tuple[OpId, object]] = []
        self._finished: list[FinishedJob[OpId]] = []

    def start(self, tag: OpId, job: object) -> None:
        self.started.append(tag)
        self.queued.append((tag, job))

    def run(self, count: int, at: int = 0) -> None:
        for tag, job in self.queued[at : at + count]:
            future: Future[object] = Future()
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
            self._finished.append(FinishedJob(tag, future))
        del self.queued[at : at + count]

    def take_finished(self) -> list[FinishedJob[OpId]]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self.queued.clear()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> ImageBench:
    directory = tmp_path_factory.mktemp("qwen2_vl")
    PeftReference("qwen2_vl", directory)
    return ImageBench("qwen2_vl", directory)


def test_text_generates_while_images_are_processed(bench: ImageBench) -> None:
    jobs = ManualJobs()
    driver = bench.driver(jobs)
    image = driver.start("one", bench.prompt(ROWS[0]), TWELVE)
    text = driver.start("two", "the mat", TWELVE)
    driver.run()
    assert isinstance(driver.end(text), GenerationEnded)
    assert driver.scheduler.is_reading
    assert driver.scheduler.operations == [image]
    jobs.run(1)
    driver.run()
    assert driver.output(image) == bench.driver().alone("one", bench.prompt(ROWS[0]), TWELVE)
    assert not driver.scheduler.is_reading


def test_a_sequence_cancelled_during_processing_never_runs(bench: ImageBench) -> None:
    jobs = ManualJobs()
    driver = bench.driver(jobs)
    ops = [driver.start("one", bench.prompt(ROWS[0]), TWELVE) for _ in range(PREFETCHED_MAX + 2)]
    for op in (ops[0], ops[-1]):
        driver.scheduler.stop(op)
        assert driver.end(op) == GenerationEnded(op, "cancelled", 0, 0)
    jobs.run(PREFETCHED_MAX)
    driver.run(steps=100)
    jobs.run(PREFETCHED_MAX)
    driver.run()
    outputs = [driver.output(op) for op in ops[1:-1]]
    assert outputs[0][0]
    assert outputs.count(outputs[0]) == PREFETCHED_MAX
    assert driver.output(ops[0]) == driver.output(ops[-1]) == ([], "")


def test_prefetched_images_are_bounded(bench: ImageBench) -> None:
    jobs = ManualJobs()
    driver = bench.driver(jobs, max_num_seqs=1, queue_requests_max=PREFETCHED_MAX + 2)
    for _ in range(PREFETCHED_MAX + 2):
        driver.start(None, bench.prompt(ROWS[0]), TWELVE)
    assert len(jobs.queued) == PREFETCHED_MAX
    with pytest.raises(Overloaded, match=str(PREFETCHED_MAX + 2)):
        driver.start(None, "the mat")
    jobs.run(PREFETCHED_MAX)
    driver.scheduler.collect()
    assert not jobs.queued
    driver.scheduler.step()
    driver.scheduler.collect()
    assert len(jobs.queued) == 1


def test_image_files_are_released_after_processing(bench: ImageBench) -> None:
    driver, prompt = bench.driver(), bench.prompt(ROWS[0])
    before = sys.getrefcount(prompt)
    driver.start("one", prompt, TWELVE)
    assert sys.getrefcount(prompt) > before
    driver.run(steps=1)
    assert not driver.scheduler.is_idle
    assert sys.getrefcount(prompt) == before


def test_a_prefix_with_images_is_reused_with_the_same_images_only(bench: ImageBench) -> None:
    text = "a @ cat and a dog and the mat and what is this? it is a cat and a dog and the mat"
    same, other = (PromptRow("one", text, (picture(20, 12, seed),)) for seed in (1, 6))
    plain = bench.driver(prefix_caching=False)
    expected = [plain.alone("one", bench.prompt(row), TWELVE) for row in (same, other)]
    assert expected[0] != expected[1]
    driver = bench.driver()
    for row, output, is_reused in (
        (same, expected[0], False),
        (other, expected[1], False),
        (same, expected[0], True),
        (other, expected[1], True),
    ):
        op = driver.start("one", bench.prompt(row), TWELVE)
        driver.run(steps=1)
        [running] = driver.scheduler.batch._members
        # All images are in the blocks, or none of them is used.
        images_end = max(
            at for at, token in enumerate(running.tokens) if token in bench.model.media_tokens
        )
        assert (running.table.reused > images_end) == bool(running.table.reused) == is_reused
        driver.run()
        assert driver.output(op) == output


def test_a_prompt_with_a_broken_image_fails_alone(bench: ImageBench) -> None:
    driver = bench.driver()
    good = driver.start("one", bench.prompt(ROWS[0]), TWELVE)
    prompt = image_prompt("qwen2_vl", "a @", picture(8, 8))
    bad = driver.start("one", structs.replace(prompt, images=(b"no image",)))
    driver.run()
    assert isinstance(driver.end(good), GenerationEnded)
    assert isinstance(end := driver.end(bad), OperationFailed)
    assert end.code == ErrorCode.MALFORMED
    assert "image 1" in end.message


def test_a_suspended_prompt_that_can_not_be_read_is_no_longer_suspended(bench: ImageBench) -> None:
    jobs = ManualJobs()
    driver = bench.driver(jobs)
    prompt = image_prompt("qwen2_vl", "a @", picture(8, 8))
    op = driver.start("one", structs.replace(prompt, images=(b"no image",)))
    driver.scheduler.leave(0, 1)
    assert driver.scheduler.suspended == [op]
    jobs.run(1)
    driver.scheduler.collect()
    assert isinstance(driver.end(op), OperationFailed)
    assert (driver.scheduler.operations, driver.scheduler.suspended) == ([], [])


def test_a_request_id_is_reserved_while_its_images_are_processed(bench: ImageBench) -> None:
    driver = bench.driver(ManualJobs())
    driver.start(None, bench.prompt(ROWS[0]), request_id="same")
    with pytest.raises(Conflict, match="same"):
        driver.start(None, "the mat", request_id="same")


def test_images_that_the_model_can_not_process_fail_alone(tmp_path: Path) -> None:
    # Without normalization a black tile is zero and counts as padding, so a token is left over.
    PeftReference("idefics3", tmp_path, do_normalize=False)
    bench = ImageBench("idefics3", tmp_path)
    assert bench.model.prompt_reader is not None, bench.model.no_images_reason
    good = PromptRow(None, "a @", (picture(9, 9, 1),))
    bad = PromptRow(None, "a @", (picture(9, 9, 1).point(lambda value: 0),))
    text = PromptRow(None, "the mat")
    driver = bench.driver()
    expected = {row.text: driver.alone(None, bench.prompt(row), TWELVE) for row in (good, text)}
    running = driver.start(None, text.text, TWELVE)
    driver.run(steps=2)
    ops = [driver.start(None, bench.prompt(row), TWELVE) for row in (good, bad, text, good)]
    driver.run()
    assert isinstance(end := driver.end(ops[1]), OperationFailed)
    assert end.code == ErrorCode.MALFORMED
    assert "the model can't process these images" in end.message
    assert [driver.output(op) for op in (running, ops[0], ops[2], ops[3])] == [
        expected[row.text] for row in (text, good, text, good)
    ]


def test_a_model_without_a_processor_refuses_images_with_the_reason(tmp_path: Path) -> None:
    PeftReference("llava", tmp_path)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink()
    bench = ImageBench("llava", tmp_path)
    driver = bench.driver()
    with pytest.raises(Malformed, match="preprocessor_config"):
        driver.start(None, image_prompt("llava", "@", picture(8, 8)))
    assert driver.alone(None, "the mat", TWELVE)[0]


WITH_TOWERS = replace(LORA, enable_tower_connector_lora=True)

TEN = Sampling(max_tokens=10)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sequences_with_images_of_several_adapters_equal_peft(kind: str, tmp_path: Path) -> None:
    reference = PeftReference(kind, tmp_path, EVERYWHERE)
    bench = ImageBench(kind, tmp_path, WITH_TOWERS)
    # Gemma 3 projects by a bare parameter.
    parts = {MappingType.TOWER} if kind == "gemma3" else {*MappingType} - {MappingType.LANGUAGE}
    assert parts <= set(bench.model.parts.values())
    driver = bench.driver(max_num_seqs=4)
    ops = [driver.start(row.adapter, bench.prompt(row), TEN) for row in ROWS]
    driver.run()
    for op, row in zip(ops, ROWS, strict=True):
        assert driver.output(op)[0] == reference.greedy(row, 10), row.text


def test_tower_adapters_for_a_model_of_text_only_are_refused(tmp_path: Path) -> None:
    build("llava").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"enable_tower_connector_lora .* text alone"):
        load_model(EngineConfig(tmp_path), WITH_TOWERS)


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

        def late(prompt: MultimodalPrompt, wanted: int) -> ProcessedPrompt:
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
def prefetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrefetchBench:
    return PrefetchBench(tmp_path, monkeypatch)


def test_an_engine_that_processes_images_is_idle_has_jobs_and_is_woken(
    prefetch: PrefetchBench,
) -> None:
    prefetch.start(1)
    prefetch.run()
    assert prefetch.engine.is_idle
    assert prefetch.engine.has_jobs
    assert prefetch.engine.inventory().running == (1,)
    assert not prefetch.reports
    prefetch.may_read.set()
    assert prefetch.woken.wait(HANG_S)
    prefetch.run()
    (end,) = [report for report in prefetch.reports if isinstance(report, GenerationEnded)]
    assert (end.op, end.finish_reason) == (1, "length")
    assert not prefetch.engine.has_jobs
    prefetch.engine.close()


def test_pixels_are_released_once_they_are_in_the_cache(
    prefetch: PrefetchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, pixels = prefetch.model.forward, []

    def watched(tokens: torch.Tensor, rows: object, images: list[ImageInputs]) -> torch.Tensor:
        pixels.extend(weakref.ref(one.tensors["pixel_values"]) for one in images)
        return forward(tokens, rows, images)

    monkeypatch.setattr(prefetch.model, "forward", watched)
    prefetch.may_read.set()
    prefetch.start(1)
    assert prefetch.woken.wait(HANG_S)
    prefetch.reports += prefetch.engine.poll()
    prefetch.engine.step()
    assert not prefetch.engine.is_idle
    assert [pixel() for pixel in pixels] == [None]


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
                command = SimpleNamespace(op=op, prompt="", priority=0)
                sequences[op] = SimpleNamespace(command=command, owner=(0, ""))
                prefetcher.add(sequences[op], Preparation(lambda op=op: op, True), ready)
            case "end" if jobs.queued:
                jobs.run(1, at=data.draw(st.integers(0, len(jobs.queued) - 1)))
            case "cancel" if left := sorted(sequences.keys() - cancelled - set(collected)):
                cancelled.add(gone := data.draw(st.sampled_from(left)))
                prefetcher.cancel(sequences[gone])
            case "use":
                ready = max(0, ready - 1)
            case "collect":
                new = prefetcher.collect(ready)
                assert all(future.result().prompt == one.command.op for one, future in new)
                collected += [one.command.op for one, _ in new]
                ready += len(new)
        assert len(jobs.queued) + ready <= max(PREFETCHED_MAX, ready)
        assert jobs.started == [op for op in sequences if op in jobs.started]
        assert len(collected) == len(set(collected))
        assert cancelled.isdisjoint(collected)
    while prefetcher.is_busy or len(prefetcher):
        jobs.run(len(jobs.queued))
        collected += [one.command.op for one, _ in prefetcher.collect(0)]
    assert set(collected) == sequences.keys() - cancelled
