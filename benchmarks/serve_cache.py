"""Figures of the cache: `serve.kv_bytes`, `serve.prefix` and `serve.shared_prefix`.

The model has random weights. The scheduler runs without an engine process, because only forward
passes and memory are compared.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.figures import Figure
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.jobs import InlineJobs
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.blocks import BLOCK_TOKENS
from loradock.engine.serving.paged_batch import PagedBatch
from loradock.engine.serving.queue import SlotTable
from loradock.engine.serving.scheduler import GenerationScheduler
from loradock.messages.commands import StartGeneration
from loradock.messages.ids import NO_SLOT, OpId
from loradock.messages.prompts import Sampling
from loradock.messages.reports import Report
from loradock.messages.requests import TokensStreamed
from tests.support.engine.block_memory import tokens_in_blocks

VOCABULARY: Final = 8192
PROMPTS: Final = 32
PROMPT_TOKENS: Final = (50, 150)
OUTPUT_TOKENS: Final = 48
ROWS: Final = 16
PREFIX_TOKENS: Final = 512
ROUNDS: Final = 5

CONFIG: Final = EngineConfig(Path(), device="cpu", max_num_seqs=ROWS)

KV_BYTES_MAX: Final = 1.25
PREFIX_MAX: Final = 0.3
SHARED_MIN: Final = 1.0


def make_model(layers: int = 12) -> CausalModel:
    """Return a Llama of 100 million parameters for 12 layers, on the CPU in float32."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    return CausalModel(LlamaForCausalLM(config), LoRAConfig(max_loras=1))


class CacheBench:
    """A scheduler of base-model requests; `reports` are those of the last run."""

    def __init__(self, model: CausalModel) -> None:
        arena, punica, _ = bind_lora(model, LoRAConfig(max_loras=1), 1 << 20)
        jobs: InlineJobs[OpId] = InlineJobs()
        self.reports: list[Report] = []
        self._scheduler = GenerationScheduler(
            model, punica, SlotTable(arena, [None]), CONFIG, self.reports.append, jobs
        )
        self._op = 0

    def start(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Queue a request."""
        self._op += 1
        self._scheduler.start(
            StartGeneration(
                op=self._op,
                request_id=str(self._op),
                adapter_id=0,
                slot=NO_SLOT,
                generation=0,
                prompt=prompt,
                sampling=Sampling(max_tokens=max_tokens),
            )
        )

    def run(self) -> Iterator[None]:
        """Step until no request is left, and yield after each step."""
        self.reports.clear()
        while not self._scheduler.is_idle:
            self._scheduler.step()
            yield

    def first_token_s(self, prompt: tuple[int, ...]) -> float:
        """Return the seconds until the first token of a request that runs alone."""
        self.start(prompt, 1)
        started = time.perf_counter()
        for _ in self.run():
            if any(isinstance(report, TokensStreamed) for report in self.reports):
                break
        seconds = time.perf_counter() - started
        for _ in self.run():
            pass
        return seconds

    def tokens_held(self) -> tuple[int, int]:
        """Return the tokens that the held blocks have room for, and those that are in them."""
        batch = self._scheduler.batch
        if not isinstance(batch, PagedBatch):
            raise TypeError("the model's probe chose a padded cache")
        return batch.pool.referenced * BLOCK_TOKENS, tokens_in_blocks(batch)


def mixed_prompts() -> list[tuple[int, ...]]:
    """Return the prompts of the mix, without a common beginning."""
    random = torch.Generator().manual_seed(4)
    shortest, longest = PROMPT_TOKENS
    lengths = torch.randint(shortest, longest + 1, (PROMPTS,), generator=random)
    return [_tokens(length, random) for length in lengths.tolist()]


def _tokens(length: int, random: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(VOCABULARY, (length,), generator=random).tolist())


def kv_bytes(model: CausalModel) -> Figure:
    """Measure the cache of the mix, as a mean over all steps."""
    bench = CacheBench(model)
    for prompt in mixed_prompts():
        bench.start(prompt, OUTPUT_TOKENS)
    held = [bench.tokens_held() for _ in bench.run()]
    room, tokens = (sum(column) for column in zip(*held, strict=True))
    layer = model.model.config
    token_bytes = 2 * 4 * layer.num_hidden_layers * layer.num_key_value_heads * layer.head_dim
    mean_mib = room / len(held) * token_bytes / (1 << 20)
    ratio = room / tokens
    return Figure(
        name="serve.kv_bytes",
        value=mean_mib,
        unit="MiB held",
        yardstick=f"the bytes of the tokens held: {mean_mib / ratio:.1f} MiB",
        ratio=ratio,
        target=f"ratio <= {KV_BYTES_MAX:g}",
        reached=ratio <= KV_BYTES_MAX,
    )


def prefix(model: CausalModel) -> Figure:
    """Measure the time to the first token of prompts, each for the first and the second time."""
    bench, random = CacheBench(model), torch.Generator().manual_seed(5)
    pairs = []
    for _ in range(ROUNDS):
        prompt = _tokens(PREFIX_TOKENS, random)
        pairs.append((bench.first_token_s(prompt), bench.first_token_s(prompt)))
    first, again = (sorted(column)[ROUNDS // 2] for column in zip(*pairs, strict=True))
    return Figure(
        name="serve.prefix",
        value=again * 1e3,
        unit="ms to the first token",
        yardstick=f"the first time: {first * 1e3:.0f} ms",
        ratio=again / first,
        target=f"ratio <= {PREFIX_MAX:g}",
        reached=again / first <= PREFIX_MAX,
    )


def shared_prefix(model: CausalModel) -> Figure:
    """Measure rows whose prompts begin alike, against rows with beginnings of their own.

    All beginnings are in the cache, so that the runs differ only in what their steps read.
    """
    bench, random = CacheBench(model), torch.Generator().manual_seed(6)
    common = _tokens(PREFIX_TOKENS, random)
    works = {
        "shared": [common] * ROWS,
        "own": [_tokens(PREFIX_TOKENS, random) for _ in range(ROWS)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(1 + ROUNDS):
        for name in works if number % 2 else reversed(works):
            for beginning in works[name]:
                bench.start(beginning + _tokens(BLOCK_TOKENS, random), OUTPUT_TOKENS)
            started = time.perf_counter()
            for _ in bench.run():
                pass
            # The first round computes the beginnings.
            if number:
                seconds[name].append(time.perf_counter() - started)
    rounds = zip(seconds["own"], seconds["shared"], strict=True)
    ratio = median(own / shared for own, shared in rounds)
    tokens = ROWS * OUTPUT_TOKENS
    return Figure(
        name="serve.shared_prefix",
        value=tokens / median(seconds["shared"]),
        unit=f"tokens/s of {ROWS} rows that share {PREFIX_TOKENS} tokens",
        yardstick=f"tokens of their own: {tokens / median(seconds['own']):.1f} tokens/s",
        ratio=ratio,
        target=f"ratio >= {SHARED_MIN:g}",
        reached=ratio >= SHARED_MIN,
    )


def run() -> Iterator[Figure]:
    """Measure the figures on one model."""
    model = make_model()
    yield kv_bytes(model)
    yield prefix(model)
    yield shared_prefix(model)
