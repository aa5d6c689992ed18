"""Adapters take turns in fewer slots: a generation that was suspended ends as if it ran alone."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters import read_adapter
from engine.config import EngineConfig
from engine.inference.padded_batch import PaddedBatch
from engine.models.causal_model import CausalModel
from engine.residency.staging import Blob, stage
from messages.commands import ResumeGeneration
from messages.prompts import Sampling, Structure
from messages.reports import GenerationEnded
from messages.requests import TokensStreamed
from tests.support.engine.generation_bench import NAMES, PROMPTS, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

SLOTS = 2
BLOCK_BYTES = 4096
SAMPLINGS = (
    Sampling(max_tokens=14),
    Sampling(max_tokens=9, temperature=0.9, seed=3, top_k=40),
    Sampling(max_tokens=12, frequency_penalty=0.7, repetition_penalty=1.3, logprobs=2),
    Sampling(max_tokens=10, temperature=0.8, seed=5, n=2, prompt_logprobs=1),
    Sampling(max_tokens=20, structure=Structure("regex", "[ab]{4,16}")),
    Sampling(max_tokens=40, stop=("e", "a", "t")),
)
REQUESTS = [
    (name, PROMPTS[number % len(PROMPTS)] * (1 + number % 3), sampling)
    for number, (name, sampling) in enumerate(
        (name, sampling) for sampling in SAMPLINGS for name in (*NAMES, None)
    )
]


class Rotation(GenerationBench):
    """Adapters in turns in `SLOTS` slots; `suspensions`: how often generations lost theirs."""

    def __init__(self, model: CausalModel, root: Path, config: EngineConfig) -> None:
        super().__init__(model, root, config)
        target = model.adapter_target(self.lora_config)
        self.blobs: dict[int, Blob] = {}
        for number, name in enumerate(NAMES):
            loaded = read_adapter(name, [root], target)
            self.blobs[number + 1] = stage(loaded.model, model.shapes, torch.float32, False)
            self.reset(number, 1)
        self.suspensions = 0
        self._generation = 1
        self._in_slots: list[tuple[int, int]] = [(0, 0)] * SLOTS
        self._waiting: deque[int] = deque()
        self._requests: dict[int, list[tuple[int, Any]]] = {}
        self._started: set[int] = set()

    def reset(self, slot: int, generation: int) -> None:
        self.arena.reset(slot, generation)
        self.residents[slot] = None

    def want(self, number: int, name: str | None, prompt: Any, sampling: Sampling) -> None:
        """Request a generation, which begins when its adapter is in a slot."""
        adapter_id = 0 if name is None else NAMES.index(name) + 1
        self._requests.setdefault(adapter_id, []).append((number, (name, prompt, sampling)))
        if adapter_id == 0:
            self._begin(number, -1, 0, (name, prompt, sampling))
        elif adapter_id not in self._waiting:
            self._waiting.append(adapter_id)

    def rotate(self) -> None:
        """Give each slot to the next adapter, if the one in it has had its turn."""
        for slot, (adapter_id, generation) in enumerate(self._in_slots):
            if not self._waiting or not self.scheduler.has_progressed(slot, generation):
                continue
            if adapter_id:
                before = len(self.scheduler.suspended)
                self.scheduler.suspend(slot, generation)
                self.suspensions += len(self.scheduler.suspended) - before
                self.reset(slot, generation)
                if self._unfinished(adapter_id):
                    self._waiting.append(adapter_id)
            self._enter(slot, self._waiting.popleft())

    def _enter(self, slot: int, adapter_id: int) -> None:
        self._generation += 1
        self.blob = self.blobs[adapter_id]
        self.write(slot, adapter_id, self._generation)
        self._in_slots[slot] = (adapter_id, self._generation)
        for number, request in self._unfinished(adapter_id):
            if number in self._started:
                resume = ResumeGeneration(900 + number, number, slot, self._generation)
                self.scheduler.resume(resume)
            else:
                self._begin(number, slot, self._generation, request)

    def _begin(self, number: int, slot: int, generation: int, request: Any) -> None:
        name, prompt, sampling = request
        self._started.add(number)
        place = {"op": number, "request_id": str(number), "slot": slot, "generation": generation}
        self.start(name, prompt, sampling, **place)

    def _unfinished(self, adapter_id: int) -> list[tuple[int, Any]]:
        ended = {report.op for report in self.reports if isinstance(report, GenerationEnded)}
        return [one for one in self._requests.get(adapter_id, ()) if one[0] not in ended]

    def streams(self, op: int) -> list[Any]:
        """Return everything that was streamed, per output; log-probabilities are rounded."""
        found: dict[int, list[Any]] = {}
        for report in self.reports:
            if isinstance(report, TokensStreamed) and report.request_id == str(op):
                tokens, text, scores, prompt, ends = found.setdefault(
                    report.index, [[], "", [], [], []]
                )
                tokens += report.tokens
                found[report.index][1] = text + report.text
                scores += [(one.token, round(one.logprob, 3)) for one in report.logprobs]
                prompt += [
                    one and (one.token, round(one.logprob, 3)) for one in report.prompt_logprobs
                ]
                ends += [(report.finish_reason, report.stop_reason)] if report.finish_reason else []
        return [found[index] for index in sorted(found)]


@pytest.fixture(scope="module")
def expected() -> dict[int, Any]:
    return {}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_cache_bytes": 12 * BLOCK_BYTES, "max_num_batched_tokens": 16},
        {"paged_attention": False},
    ],
    ids=["paged", "too few blocks", "padded"],
)
def test_generations_in_turns_end_as_if_each_ran_alone(
    fields: dict[str, Any],
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    expected: dict[int, Any],
) -> None:
    if not expected:
        alone = Rotation(prepared_model, adapter_root, engine_config)
        for number, request in enumerate(REQUESTS, 1):
            alone.want(number, *request)
            alone.rotate()
            alone.run()
            expected[number] = alone.streams(number)
        assert not alone.suspensions
    bench = Rotation(prepared_model, adapter_root, replace(engine_config, **fields))
    for number, request in enumerate(REQUESTS, 1):
        bench.want(number, *request)
    while bench._waiting or not bench.scheduler.is_idle:
        bench.rotate()
        bench.run(steps=2)
    assert {number: bench.streams(number) for number in expected} == expected
    assert bench.suspensions > 2 * len(REQUESTS)
    assert bench.scheduler.kv_use.size_bytes == 0
    assert isinstance(bench.scheduler.batch, PaddedBatch) == ("paged_attention" in fields)


@pytest.mark.parametrize("paged", [True, False])
def test_a_suspended_generation_that_is_stopped_ends_and_frees_its_memory(
    paged: bool, prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> None:
    config = replace(engine_config, paged_attention=paged)
    bench = GenerationBench(prepared_model, adapter_root, config)
    op = bench.start(NAMES[0], PROMPTS[1], Sampling(max_tokens=50, ignore_eos=True))
    assert not bench.scheduler.has_progressed(0, 1)
    bench.run(steps=4)
    assert bench.scheduler.has_progressed(0, 1)
    bench.scheduler.suspend(0, 1)
    assert (bench.scheduler.is_idle, bench.scheduler.suspended) == (True, [op])
    assert bench.scheduler.operations == [op]
    assert bench.scheduler.kv_use.size_bytes > 0
    bench.scheduler.stop(op)
    end = bench.end(op)
    assert isinstance(end, GenerationEnded)
    assert (end.finish_reason, end.output_tokens) == ("cancelled", len(bench.output(op)[0]))
    assert (bench.scheduler.suspended, bench.scheduler.kv_use.size_bytes) == ([], 0)
    bench.scheduler.resume(ResumeGeneration(99, op, 0, 1))
    assert bench.scheduler.is_idle
