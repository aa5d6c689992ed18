"""Sequences over blocks: prefixes are shared within a version, and a lack of blocks fails none.

Of a model whose layers all have windows, sequences have blocks of their windows only.
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
import structlog
import torch
from msgspec import structs
from peft import PeftModel
from transformers import MistralConfig, MistralForCausalLM

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.residency.staging import stage
from loradock.engine.serving.blocks import BLOCK_TOKENS, BlockPool, BlockTable, blocks_around
from loradock.engine.serving.padded_batch import PaddedBatch
from loradock.engine.serving.paged_batch import PagedBatch, PagedSequence
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling
from loradock.messages.reports import OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.block_memory import check_pool, poison, tokens_in_blocks
from tests.support.engine.engine_examples import tiny_config
from tests.support.engine.generation_bench import NAMES, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

BLOCK_BYTES = 4096

CONTEXT_BLOCKS = 8

"""Of the tiny model: one block in all layers, and the blocks of one sequence of the most tokens."""

LONG = tuple(7 * index % 250 for index in range(60))

SHORT = Sampling(max_tokens=4)


@pytest.fixture
def bench_of(bench_of: Any, no_eos: None) -> Any:
    return bench_of


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Callable[[GenerationBench], list[list[int]]]:
    """Return the tokens of each row of every pass from now on, in a list."""

    def record(bench: GenerationBench) -> list[list[int]]:
        passes: list[list[int]] = []
        bench.intercept(monkeypatch, lambda tokens, run: passes.append(tokens) or run())
        return passes

    return record


def prompt_tokens(passes: list[list[int]]) -> int:
    """Return the tokens of all passes that belong to prompts; decode steps have one per row."""
    found = sum(count for tokens in passes for count in tokens if count > 1)
    passes.clear()
    return found


def test_a_lack_of_blocks_fails_no_sequence_and_changes_no_token(bench_of: Any) -> None:
    """Outputs of up to 60 tokens over blocks for two of the longest sequences, twice."""
    requests = [
        (name, LONG[start : start + length], Sampling(max_tokens=60 - length // 2))
        for start, (name, length) in enumerate(
            (name, length) for length in (50, 3, 20) for name in (None, *NAMES[:3])
        )
    ]
    ample = bench_of(prefix_caching=False)
    expected = [ample.alone(*request) for request in requests]
    for shares in (False, True):
        bench = bench_of(
            kv_cache_bytes=2 * CONTEXT_BLOCKS * BLOCK_BYTES,
            max_num_batched_tokens=24,
            prefix_caching=shares,
        )
        preempted = bench.record_preemptions()
        ops = [bench.start(*request) for request in requests]
        pool = bench.scheduler.batch.pool
        while not bench.scheduler.is_idle:
            bench.run(steps=1)
            check_pool(pool)
        assert [bench.output(op) for op in ops] == expected
        assert len(preempted) >= 2
        assert (pool.referenced, pool.blocks) == (0, 2 * CONTEXT_BLOCKS)


def test_a_cache_that_is_too_small_for_one_sequence_is_refused(bench_of: Any) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_bytes.*{CONTEXT_BLOCKS * BLOCK_BYTES} bytes"):
        bench_of(kv_cache_bytes=CONTEXT_BLOCKS * BLOCK_BYTES - 1)
    bench_of(kv_cache_bytes=CONTEXT_BLOCKS * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("fields", "reason"), [({}, ""), ({"paged_attention": False}, "paged_attention is off")]
)
def test_the_cache_and_the_reason_for_a_padded_one_are_logged(
    bench_of: Any, fields: dict[str, bool], reason: str
) -> None:
    with structlog.testing.capture_logs() as logs:
        batch = bench_of(**fields).scheduler.batch
    assert isinstance(batch, PaddedBatch if reason else PagedBatch)
    [entry] = [one for one in logs if "key/value cache" in one["event"]]
    assert entry["log_level"] == ("warning" if reason else "info")
    assert entry.get("reason", "") == reason


def test_a_long_row_among_short_ones_holds_blocks_for_its_own_tokens(bench_of: Any) -> None:
    # A budget by the machine's speed would divide the prompts on a slow one.
    bench = bench_of(max_num_batched_tokens=1024)
    bench.start(None, LONG + LONG[:40], Sampling(max_tokens=8))
    for start in range(15):
        bench.start(None, LONG[start : start + 3], Sampling(max_tokens=8))
    bench.run(steps=4)
    batch = bench.scheduler.batch
    assert len(batch.running) == 16
    assert batch.pool.referenced == -(-104 // BLOCK_TOKENS) + 15
    assert tokens_in_blocks(batch) == 103 + 15 * 6


def test_a_prefix_is_computed_once_per_version(
    bench_of: Any,
    computed: Callable[[GenerationBench], list[list[int]]],
    prepared_model: CausalModel,
    adapter_root: Path,
) -> None:
    """The second version of an adapter has other weights under the same id and in the same slot."""
    config = LoRAConfig(max_lora_rank=16, lora_dtype="float32")
    other = read_adapter(NAMES[1], [adapter_root], prepared_model.adapter_target(config)).model
    blob = stage(other, prepared_model.shapes, torch.float32)
    requests = [(name, (*LONG, tail), SHORT) for name in (None, *NAMES[:2]) for tail in (1, 2)]

    def run(bench: GenerationBench) -> tuple[list[object], list[int]]:
        """All requests one by one, and the first one of the first adapter's second version."""
        passes = computed(bench)
        outputs, counts = [], []
        for request in requests:
            outputs.append(bench.alone(*request))
            counts.append(prompt_tokens(passes))
        bench.arena.reset(0, 1)
        bench.blobs[1] = blob
        bench.write(0, 1, 2)
        op = bench.start(*requests[2], generation=2)
        bench.run()
        return [*outputs, bench.output(op)], [*counts, prompt_tokens(passes)]

    expected, _ = run(bench_of(prefix_caching=False))
    assert expected[6] == expected[4] != expected[2]
    outputs, counts = run(bench_of())
    assert outputs == expected
    whole, rest = len(LONG) + 1, len(LONG) % BLOCK_TOKENS + 1
    assert counts == [*[whole, rest] * 3, whole]


def test_samples_of_one_prompt_share_it_while_it_is_computed(
    bench_of: Any, computed: Callable[[GenerationBench], list[list[int]]]
) -> None:
    bench = bench_of(max_num_batched_tokens=20)
    expected = bench.alone(NAMES[0], LONG, SHORT)
    bench = bench_of(max_num_batched_tokens=20)
    passes = computed(bench)
    ops = [bench.start(NAMES[0], LONG, SHORT) for _ in range(4)]
    bench.run()
    assert [bench.output(op) for op in ops] == [expected] * 4
    shared = 3 * BLOCK_TOKENS
    assert prompt_tokens(passes) == len(LONG) + 3 * (len(LONG) - shared)


def test_outputs_of_one_request_share_the_blocks_of_its_prompt(
    bench_of: Any, computed: Callable[[GenerationBench], list[list[int]]]
) -> None:
    bench = bench_of()
    passes = computed(bench)
    sampling = Sampling(max_tokens=4, temperature=1.0, seed=3, n=4)
    op = bench.start(NAMES[0], LONG, sampling)
    bench.run(steps=3)
    shared = len(LONG) // BLOCK_TOKENS
    batch = bench.scheduler.batch
    assert len(batch.running) == 4
    assert len({tuple(row.table.blocks[:shared]) for row in batch._members}) == 1
    assert batch.pool.referenced == shared + 4
    bench.run()
    assert prompt_tokens(passes) == len(LONG) + 3 * (len(LONG) - shared * BLOCK_TOKENS)
    assert bench.end(op).output_tokens == 16


def test_a_prompt_with_log_probabilities_is_computed_whole_and_reused_by_others(
    bench_of: Any, computed: Callable[[GenerationBench], list[list[int]]]
) -> None:
    bench = bench_of()
    rest = len(LONG) % BLOCK_TOKENS
    passes = computed(bench)
    scored = Sampling(max_tokens=4, prompt_logprobs=1)
    alone = bench.alone(NAMES[0], LONG, scored)
    assert prompt_tokens(passes) == len(LONG)
    # In a later request, and while another request with log-probabilities computes the prompt.
    assert bench.alone(NAMES[0], LONG, SHORT) == alone
    assert prompt_tokens(passes) == rest
    ops = [bench.start(NAMES[0], LONG, scored) for _ in range(2)]
    others = bench.start(NAMES[0], LONG, structs.replace(scored, n=3))
    bench.run()
    assert prompt_tokens(passes) == 3 * len(LONG) + 2 * rest
    assert [bench.output(op) for op in ops] == [alone] * 2
    assert bench.end(others).output_tokens == 12


def test_the_logits_of_prompts_in_memory_are_bounded(
    bench_of: Any,
    computed: Callable[[GenerationBench], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_of()
    token_bytes = 4 * bench.model.vocab_size
    monkeypatch.setattr("loradock.engine.serving.forward.PROMPT_LOGITS_BYTES_MAX", 7 * token_bytes)
    passes = computed(bench)
    scored = Sampling(max_tokens=1, prompt_logprobs=0)
    for start in range(2):
        bench.start(None, LONG[start:], scored)
    bench.run()
    assert max(map(sum, passes)) <= 7
    assert sum(map(sum, passes)) == 2 * len(LONG) - 1
    entries = [
        report.prompt_logprobs for report in bench.reports if getattr(report, "prompt_logprobs", ())
    ]
    assert [len(one) for one in entries] == [len(LONG), len(LONG) - 1]


def test_a_beginning_of_another_length_or_content_is_not_reused(
    bench_of: Any, computed: Callable[[GenerationBench], list[list[int]]]
) -> None:
    bench = bench_of()
    bench.alone(None, LONG, SHORT)
    passes = computed(bench)
    for prompt, reused in (
        ((9, *LONG[1:]), 0),
        ((*LONG[:20], 9, *LONG[21:]), 1),
        (LONG[: 2 * BLOCK_TOKENS], 1),
        (LONG[: 2 * BLOCK_TOKENS + 2], 2),
        (LONG, 3),
    ):
        bench.alone(None, prompt, SHORT)
        assert prompt_tokens(passes) == len(prompt) - reused * BLOCK_TOKENS


def test_nan_in_the_blocks_of_one_row_reaches_no_other(bench_of: Any) -> None:
    """Neither while the row runs, nor after other rows have taken its blocks."""
    bench = bench_of(kv_cache_bytes=2 * CONTEXT_BLOCKS * BLOCK_BYTES, prefix_caching=False)
    requests = [(name, LONG[:length], SHORT) for name in (None, *NAMES) for length in (40, 21, 3)]
    expected = [bench.alone(*request) for request in requests]
    poisoned = bench.start(NAMES[0], LONG[:30], Sampling(max_tokens=90))
    others = [bench.start(*request) for request in requests[:3]]
    bench.run(steps=2)
    batch = bench.scheduler.batch
    row = next(one for one in batch._members if one.sequence.command.op == poisoned)
    poison(batch._packed.cache, row.table.blocks)
    bench.run()
    assert isinstance(end := bench.end(poisoned), OperationFailed)
    assert end.code == ErrorCode.NOT_FINITE
    later = [bench.start(*request) for request in requests[3:]]
    bench.run()
    assert [bench.output(op) for op in (*others, *later)] == expected


def test_a_step_is_not_larger_than_its_budget_and_long_prompts_always_advance(
    bench_of: Any, computed: Callable[[GenerationBench], list[list[int]]]
) -> None:
    """New short prompts in every step leave half of each chunk to the oldest prompt."""
    bench = bench_of(max_num_batched_tokens=8, prefix_caching=False)
    passes = computed(bench)
    long = bench.start(None, LONG, SHORT)
    for number in range(40):
        bench.start(None, (number, *LONG[:7]), Sampling(max_tokens=1))
        bench.run(steps=1)
        if bench.output(long)[0]:
            break
    assert bench.output(long)[0]
    assert len(passes) <= -(-len(LONG) // 4) + 1
    assert max(map(sum, passes)) <= 8


WINDOW = 20

CONTEXT = 256

LONGER = tuple(7 * index % 250 for index in range(130))

WINDOW_REQUESTS = [
    (name, LONGER[start : start + length], 60 - start)
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
def window_bench_of(model: CausalModel, adapter_root: Path, engine_config: EngineConfig) -> Any:
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
    window_bench_of: Any,
    generate: Callable[..., list[int]],
) -> None:
    """Rows of up to 12 blocks, over 5 or 7 blocks of which they preempt each other, or over all."""
    bench = window_bench_of(
        kv_cache_bytes=blocks * BLOCK_BYTES, max_num_batched_tokens=step, prefix_caching=shares
    )
    bench.batch._packed.groups_decodes = groups_decodes
    preempted = bench.record_preemptions()
    ops = [
        bench.start(name, prompt, Sampling(max_tokens=count))
        for name, prompt, count in WINDOW_REQUESTS
    ]
    bench.run()
    for op, request in zip(ops, WINDOW_REQUESTS, strict=True):
        assert bench.output(op)[0] == generate(*request), request
    assert bench.batch.pool.referenced == 0
    assert bool(preempted) == (blocks < 8)


def test_more_rows_run_together_than_whole_rows_would_fit(window_bench_of: Any) -> None:
    """Each of 8 prompts of 9 blocks counts as the 4 that it holds at most, and one to grow."""
    bench = window_bench_of(kv_cache_bytes=40 * BLOCK_BYTES, max_num_batched_tokens=24)
    for start in range(8):
        bench.start(None, LONGER[start:], Sampling(max_tokens=100))
    bench.run(steps=1)
    assert len(bench.batch.prefilling) == 8
    bench.run(steps=60)
    assert len(bench.batch.running) == 8
    assert bench.batch.pool.referenced <= 8 * blocks_around(WINDOW)


def test_a_cache_that_is_too_small_for_a_window_is_refused(window_bench_of: Any) -> None:
    fields = {"max_num_batched_tokens": 24}
    window_bench_of(kv_cache_bytes=4 * BLOCK_BYTES, **fields)
    with pytest.raises(ValueError, match=rf"may hold 64; allow {4 * BLOCK_BYTES} bytes"):
        window_bench_of(kv_cache_bytes=4 * BLOCK_BYTES - 1, **fields)


def test_a_prefix_is_reused_from_the_blocks_of_its_last_window(
    window_bench_of: Any, generate: Callable[..., list[int]]
) -> None:
    """Also while they are in use, and after the blocks before them have been evicted."""
    bench = window_bench_of(kv_cache_bytes=16 * BLOCK_BYTES, max_num_batched_tokens=24)
    name, shared = NAMES[0], len(LONGER) // BLOCK_TOKENS * BLOCK_TOKENS
    prompts = [(*LONGER, *tail) for tail in ((1,), (2, 3), (4,))]
    bench.start(name, prompts[0], Sampling(max_tokens=9))
    bench.run(steps=8)
    assert bench.batch.running
    ops = [bench.start(name, prompt, Sampling(max_tokens=5)) for prompt in prompts[1:]]
    bench.run()
    for op, prompt in zip(ops, prompts[1:], strict=True):
        assert bench.output(op)[0] == generate(name, prompt, 5)
        assert bench.end(op).prefix_tokens == shared
    # Blocks of another prompt take the place of those that were used the longest time ago.
    bench.alone(None, LONGER[1:], Sampling(max_tokens=40))
    last = bench.start(name, prompts[0], Sampling(max_tokens=5))
    bench.run(steps=1)
    batch = bench.batch
    assert batch.pool.find(batch._members[0].keys[:1], 1).end == 0
    bench.run()
    assert bench.end(last).prefix_tokens == shared
    assert bench.output(last)[0] == generate(name, prompts[0], 5)


def test_samples_and_scored_prompts_are_those_of_a_padded_cache(
    window_bench_of: Any,
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
    paged = window_bench_of(kv_cache_bytes=14 * BLOCK_BYTES, max_num_batched_tokens=24)
    passes: list[list[int]] = []
    paged.intercept(monkeypatch, lambda tokens, run: passes.append(tokens) or run())
    assert [streams(paged, sampling) for sampling in samplings] == expected
    computed = sum(count for tokens in passes for count in tokens if count > 1)
    assert computed == len(LONGER) + (3 - 1) * (len(LONGER) % BLOCK_TOKENS) + len(LONGER)


def streams(
    bench: GenerationBench, sampling: Sampling
) -> dict[int, tuple[list[int], list[object]]]:
    """Generate; return the tokens of each output, and the log-probabilities of its prompt."""
    bench.reports.clear()
    bench.start(NAMES[1], LONGER, sampling)
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
    steps: int, window_bench_of: Any, generate: Callable[..., list[int]]
) -> None:
    """Suspended in its prompt and in its output, and with its blocks kept or taken by others."""
    for others in (1, 12):
        bench = window_bench_of(kv_cache_bytes=12 * BLOCK_BYTES, max_num_batched_tokens=24)
        op = bench.start(NAMES[0], LONGER, Sampling(max_tokens=60))
        bench.run(steps=steps)
        bench.suspend(0, 1)
        [row] = bench.batch._suspended.values()
        assert row.table.released > 0
        for start in range(others):
            bench.start(None, LONGER[start:], Sampling(max_tokens=9))
        bench.run()
        assert any(row.table.blocks for row in bench.batch._suspended.values()) == (others == 1)
        bench.write_again(0)
        bench.run()
        assert bench.output(op)[0] == generate(NAMES[0], LONGER, 60)


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
