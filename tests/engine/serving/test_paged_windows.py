"""Sequences of a model whose layers all have windows: they hold blocks of their windows only.

Every block that no sequence holds is overwritten before each step, unless it is kept for a prefix.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import MistralConfig, MistralForCausalLM

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.blocks import BLOCK_TOKENS, BlockPool, BlockTable, blocks_around
from loradock.engine.serving.paged_batch import PagedBatch, PagedSequence
from loradock.messages.commands import ResumeGeneration
from loradock.messages.prompts import Sampling
from loradock.messages.requests import TokensStreamed
from tests.support.engine.block_memory import check_pool, poison, tokens_in_blocks
from tests.support.engine.engine_examples import tiny_config
from tests.support.engine.generation_bench import NAMES, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

WINDOW = 20
CONTEXT = 256
BLOCK_BYTES = 4096
LONG = tuple(7 * index % 250 for index in range(130))
REQUESTS = [
    (name, LONG[start : start + length], 60 - start)
    for start, (name, length) in enumerate(
        (name, length) for length in (3, 130, 4) for name in (None, *NAMES[:2])
    )
]


def windowed() -> MistralForCausalLM:
    """A random model with the modules of the tiny model, so that its adapters fit."""
    fields = tiny_config().to_dict() | {"model_type": "mistral", "eos_token_id": None}
    changes = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    torch.manual_seed(7)
    return MistralForCausalLM(MistralConfig(**(fields | changes))).eval()


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(windowed(), LoRAConfig(max_lora_rank=16, max_loras=4))


@pytest.fixture(scope="module")
def generate(adapter_root: Path) -> Callable[..., list[int]]:
    """Return the tokens with the largest logits, by PEFT, each from one pass without a cache."""
    base = windowed()
    adapted = {name: PeftModel.from_pretrained(windowed(), adapter_root / name) for name in NAMES}

    @cache
    @torch.no_grad()
    def greedy(name: str | None, prompt: tuple[int, ...], count: int) -> list[int]:
        run, tokens = (base if name is None else adapted[name].eval()), list(prompt)
        for _ in range(count):
            tokens.append(int(run(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return greedy


class WindowBench(GenerationBench):
    """Checks the laws of a windowed model's blocks before each step; `steps`: their number."""

    def run(self, steps: int = 1000) -> None:
        for _ in range(steps):
            self.check()
            super().run(steps=1)
            if self.scheduler.is_idle:
                break
        self.check()

    @property
    def batch(self) -> PagedBatch:
        return self.scheduler.batch

    def check(self) -> None:
        """Compare blocks, bytes and tokens; overwrite the blocks that are free."""
        batch, pool = self.batch, self.batch.pool
        check_pool(pool)
        rows = [*batch._members, *batch._suspended.values()]
        most = blocks_around(WINDOW - 1 + batch.budget.tokens)
        assert all(len(row.table.blocks) <= most for row in rows)
        held = {block for row in rows for block in row.table.blocks}
        assert batch.kv_use.size_bytes == len(held) * BLOCK_BYTES == pool.referenced * BLOCK_BYTES
        tables = [row.table for row in rows if row.table.blocks]
        places = {one.place(at) for one in tables for at in range(one.start, one.length)}
        assert tokens_in_blocks(batch) == len(places)
        free = [block for block, is_free in enumerate(pool._is_free) if is_free]
        poison(batch._packed.cache, free)


@pytest.fixture
def bench_of(model: CausalModel, adapter_root: Path, engine_config: EngineConfig) -> Any:
    return lambda **fields: WindowBench(model, adapter_root, replace(engine_config, **fields))


@pytest.mark.parametrize(
    ("step", "blocks", "shares", "groups_decodes"),
    [
        (7, 5, True, False),
        (24, 7, False, False),
        (24, 7, True, True),
        (200, 256, True, False),
    ],
)
def test_long_rows_in_few_blocks_have_the_tokens_of_transformers(
    step: int,
    blocks: int,
    shares: bool,
    groups_decodes: bool,
    bench_of: Any,
    generate: Callable[..., list[int]],
) -> None:
    """Rows of up to 12 blocks, over 5 or 7 blocks of which they preempt each other, or over all."""
    bench = bench_of(
        kv_cache_bytes=blocks * BLOCK_BYTES, max_num_batched_tokens=step, prefix_caching=shares
    )
    bench.batch._packed.groups_decodes = groups_decodes
    preempted = bench.record_preemptions()
    ops = [
        bench.start(name, prompt, Sampling(max_tokens=count)) for name, prompt, count in REQUESTS
    ]
    bench.run()
    for op, request in zip(ops, REQUESTS, strict=True):
        assert bench.output(op)[0] == generate(*request), request
    assert bench.batch.pool.referenced == 0
    assert bool(preempted) == (blocks < 8)


def test_more_rows_run_together_than_whole_rows_would_fit(bench_of: Any) -> None:
    """Each of 8 prompts of 9 blocks counts as the 4 that it holds at most, and one to grow."""
    bench = bench_of(kv_cache_bytes=40 * BLOCK_BYTES, max_num_batched_tokens=24)
    for start in range(8):
        bench.start(None, LONG[start:], Sampling(max_tokens=100))
    bench.run(steps=1)
    assert len(bench.batch.prefilling) == 8
    bench.run(steps=60)
    assert len(bench.batch.running) == 8
    assert bench.batch.pool.referenced <= 8 * blocks_around(WINDOW)


def test_a_cache_that_is_too_small_for_a_window_is_refused(bench_of: Any) -> None:
    fields = {"max_num_batched_tokens": 24}
    bench_of(kv_cache_bytes=4 * BLOCK_BYTES, **fields)
    with pytest.raises(ValueError, match=rf"may hold 64; allow {4 * BLOCK_BYTES} bytes"):
        bench_of(kv_cache_bytes=4 * BLOCK_BYTES - 1, **fields)


def test_a_prefix_is_reused_from_the_blocks_of_its_last_window(
    bench_of: Any, generate: Callable[..., list[int]]
) -> None:
    """Also while they are in use, and after the blocks before them have been evicted."""
    bench = bench_of(kv_cache_bytes=16 * BLOCK_BYTES, max_num_batched_tokens=24)
    name, shared = NAMES[0], len(LONG) // BLOCK_TOKENS * BLOCK_TOKENS
    prompts = [(*LONG, *tail) for tail in ((1,), (2, 3), (4,))]
    bench.start(name, prompts[0], Sampling(max_tokens=9))
    bench.run(steps=8)
    assert bench.batch.running
    ops = [bench.start(name, prompt, Sampling(max_tokens=5)) for prompt in prompts[1:]]
    bench.run()
    for op, prompt in zip(ops, prompts[1:], strict=True):
        assert bench.output(op)[0] == generate(name, prompt, 5)
        assert bench.end(op).prefix_tokens == shared
    # Blocks of another prompt take the place of those that were used the longest time ago.
    bench.alone(None, LONG[1:], Sampling(max_tokens=40))
    last = bench.start(name, prompts[0], Sampling(max_tokens=5))
    bench.run(steps=1)
    batch = bench.batch
    assert batch.pool.find(batch._members[0].keys[:1], 1).end == 0
    bench.run()
    assert bench.end(last).prefix_tokens == shared
    assert bench.output(last)[0] == generate(name, prompts[0], 5)


def test_samples_and_scored_prompts_are_those_of_a_padded_cache(
    bench_of: Any,
    model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples wait while the first one computes their prompt, and scored prompts are whole."""
    samplings = (
        Sampling(max_tokens=30, temperature=1.0, seed=3, n=3),
        Sampling(max_tokens=4, prompt_logprobs=1),
    )
    padded = GenerationBench(model, adapter_root, replace(engine_config, paged_attention=False))
    expected = [streams(padded, sampling) for sampling in samplings]
    paged = bench_of(kv_cache_bytes=14 * BLOCK_BYTES, max_num_batched_tokens=24)
    passes: list[list[int]] = []
    paged.intercept(monkeypatch, lambda tokens, run: passes.append(tokens) or run())
    assert [streams(paged, sampling) for sampling in samplings] == expected
    computed = sum(count for tokens in passes for count in tokens if count > 1)
    assert computed == len(LONG) + (3 - 1) * (len(LONG) % BLOCK_TOKENS) + len(LONG)


def streams(
    bench: GenerationBench, sampling: Sampling
) -> dict[int, tuple[list[int], list[object]]]:
    """Generate; return the tokens of each output, and the log-probabilities of its prompt."""
    bench.reports.clear()
    bench.start(NAMES[1], LONG, sampling)
    bench.run()
    found: dict[int, tuple[list[int], list[object]]] = {}
    for report in bench.reports:
        if isinstance(report, TokensStreamed):
            tokens, scores = found.setdefault(report.index, ([], []))
            tokens += report.tokens
            scores += [one and (one.token, round(one.logprob, 3)) for one in report.prompt_logprobs]
    return found


@pytest.mark.parametrize("steps", [3, 20])
def test_a_suspended_row_keeps_its_window_or_is_computed_again(
    steps: int, bench_of: Any, generate: Callable[..., list[int]]
) -> None:
    """Suspended in its prompt and in its output, and with its blocks kept or taken by others."""
    for others in (1, 12):
        bench = bench_of(kv_cache_bytes=12 * BLOCK_BYTES, max_num_batched_tokens=24)
        op = bench.start(NAMES[0], LONG, Sampling(max_tokens=60))
        bench.run(steps=steps)
        bench.scheduler.suspend(0, 1)
        [row] = bench.batch._suspended.values()
        assert row.table.released > 0
        for start in range(others):
            bench.start(None, LONG[start:], Sampling(max_tokens=9))
        bench.run()
        assert any(row.table.blocks for row in bench.batch._suspended.values()) == (others == 1)
        bench.scheduler.resume(ResumeGeneration(99, op, 0, 1))
        bench.run()
        assert bench.output(op)[0] == generate(NAMES[0], LONG, 60)


def test_windows_that_advance_in_turn_stay_adjacent() -> None:
    """A row has room for two windows again once it has used that for the first two."""
    chance, pool, cuts = random.Random(1), BlockPool(200), []
    sequence: Any = SimpleNamespace(
        tokens=[1] * 5,
        prompt_length=5,
        needs_prompt_logprobs=False,
        images=None,
        tokens_max=100_000,
    )
    rows = [PagedSequence(sequence, BlockTable(pool, None, 160), blocks_max=11) for _ in range(6)]
    for _ in range(300):
        for row in rows:
            length = row.table.length + chance.randint(1, BLOCK_TOKENS)
            assert row.reserve(length)
            row.advance(length)
            cuts += [after != before + 1 for before, after in pairwise(row.table.blocks)]
    assert sum(cuts) < 0.05 * len(cuts)
