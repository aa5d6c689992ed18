"""Adapters take turns in fewer slots: a generation that was suspended ends as if it ran alone."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loradock.engine.config import EngineConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.padded_batch import PaddedBatch, PrefillBatch
from loradock.engine.serving.paged_cache import PagedKVCache
from loradock.messages.commands import ResumeGeneration
from loradock.messages.prompts import Sampling, Structure
from loradock.messages.reports import GenerationEnded, OperationFailed
from tests.support.engine.generation_bench import NAMES, PROMPTS, GenerationBench
from tests.support.engine.slot_turns import Rotation

pytest_plugins = ("tests.support.engine.engine_fixtures",)

BLOCK_BYTES = 4096
TOO_FEW_BLOCKS = {"kv_cache_bytes": 12 * BLOCK_BYTES, "max_num_batched_tokens": 16}
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


@pytest.fixture(scope="module")
def expected() -> dict[int, Any]:
    return {}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        TOO_FEW_BLOCKS,
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
    wanted = streams_alone(expected, prepared_model, adapter_root, engine_config)
    bench = Rotation(prepared_model, adapter_root, replace(engine_config, **fields))
    run_in_turns(bench)
    assert streams(bench) == wanted
    assert bench.suspensions > 2 * len(REQUESTS)
    assert bench.scheduler.kv_use.size_bytes == 0
    assert isinstance(bench.scheduler.batch, PaddedBatch) == ("paged_attention" in fields)


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_lack_of_memory_for_suspended_sequences_ends_none_that_can_be_computed_again(
    is_paged: bool,
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    expected: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = TOO_FEW_BLOCKS if is_paged else {"paged_attention": False}
    wanted = streams_alone(expected, prepared_model, adapter_root, engine_config)
    bench = Rotation(prepared_model, adapter_root, replace(engine_config, **fields))
    batch = bench.scheduler.batch
    copies = [(PrefillBatch, "take")]
    copies += [(PagedKVCache, "read"), (PagedKVCache, "write")] if is_paged else []
    copies += [] if is_paged else [(type(batch._cache), "take")]
    failures = [fail_every_other_call(monkeypatch, *copy) for copy in copies]
    run_in_turns(bench)
    assert streams(bench) == wanted
    assert bench.scheduler.kv_use.size_bytes == 0
    assert any(failures)


def run_in_turns(bench: Rotation) -> None:
    for number, request in enumerate(REQUESTS, 1):
        bench.want(number, *request)
    while bench._waiting or not bench.scheduler.is_idle:
        bench.rotate()
        bench.run(steps=2)


def streams(bench: Rotation) -> dict[int, Any]:
    return {number: bench.streams(number) for number in range(1, 1 + len(REQUESTS))}


def streams_alone(
    expected: dict[int, Any], model: CausalModel, root: Path, config: EngineConfig
) -> dict[int, Any]:
    """Return the outputs of each request alone, which are computed once."""
    if not expected:
        alone = Rotation(model, root, config)
        for number, request in enumerate(REQUESTS, 1):
            alone.want(number, *request)
            alone.rotate()
            alone.run()
        expected.update(streams(alone))
        assert not alone.suspensions
    return expected


def fail_every_other_call(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """Let memory lack in every other call; return the list of the calls that failed."""
    run, calls, failed = getattr(owner, name), itertools.count(), []

    def failing(*arguments: Any) -> Any:
        if next(calls) % 2 == 0:
            failed.append(name)
            raise torch.OutOfMemoryError("none")
        return run(*arguments)

    monkeypatch.setattr(owner, name, failing)
    return failed


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


def test_a_resumed_generation_whose_slot_is_lost_fails_and_frees_its_memory(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig, no_eos: None
) -> None:
    bench = GenerationBench(prepared_model, adapter_root, engine_config)
    op = bench.start(NAMES[0], PROMPTS[1], Sampling(max_tokens=50))
    bench.run(steps=4)
    bench.scheduler.suspend(0, 1)
    bench.scheduler.resume(ResumeGeneration(99, op, 0, 1))
    bench.arena.reset(0, 1)
    bench.residents[0] = None
    bench.run()
    assert isinstance(bench.end(op), OperationFailed)
    assert bench.scheduler.kv_use.size_bytes == 0


@pytest.mark.parametrize("paged", [True, False])
def test_the_oldest_of_an_adapters_generations_continues_first(
    paged: bool,
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    no_eos: None,
) -> None:
    config = replace(engine_config, paged_attention=paged, max_num_seqs=1)
    bench = GenerationBench(prepared_model, adapter_root, config)
    ops = [bench.start(NAMES[0], PROMPTS[1], Sampling(max_tokens=50)) for _ in range(3)]
    bench.run(steps=4)
    bench.scheduler.suspend(0, 1)
    for op in ops:
        bench.scheduler.resume(ResumeGeneration(99, op, 0, 1))
    for op in ops:
        bench.run(steps=1)
        assert bench.scheduler.running == [op]
        bench.scheduler.stop(op)


def test_a_suspended_generation_keeps_blocks_that_would_be_too_few_for_another(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> None:
    """Of 16 blocks 3 are suspended and 7 in use; a prompt of 8 waits for those in use."""
    config = replace(
        engine_config,
        kv_cache_bytes=16 * BLOCK_BYTES,
        max_num_batched_tokens=64,
        prefix_caching=False,
    )
    bench = GenerationBench(prepared_model, adapter_root, config)
    bench.start(NAMES[0], tuple(range(40)), Sampling(max_tokens=20, ignore_eos=True))
    bench.run(steps=2)
    bench.scheduler.suspend(0, 1)
    bench.start(None, tuple(range(100)), Sampling(max_tokens=28, ignore_eos=True))
    bench.run(steps=5)
    other = bench.start(None, tuple(range(117)), Sampling(max_tokens=11, ignore_eos=True))
    bench.run(steps=1)
    assert bench.scheduler.batch.lacks_memory
    [row] = bench.scheduler.batch._suspended.values()
    assert len(row.table.blocks) == 3
    bench.run()
    assert isinstance(bench.end(other), GenerationEnded)
    assert len(row.table.blocks) == 3
