"""No request waits forever: while requests wait or run, steps generate tokens, and the oldest ends.

Passes over blocks are replaced by random tokens, because only the order of the work is tested here.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loradock.engine.config import EngineConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.paged_batch import PagedBatch
from loradock.messages.prompts import Sampling
from loradock.messages.requests import TokensStreamed
from tests.support.engine.block_memory import check_pool
from tests.support.engine.generation_bench import NAMES
from tests.support.engine.slot_turns import Rotation

pytest_plugins = ("tests.support.engine.engine_fixtures",)

BLOCK_BYTES = 4096
ROW_BLOCKS = 8
"""The blocks of one row of the most tokens."""

PATIENCE = 24
"""The steps of a turn: a prompt of the most tokens takes up to 128."""

CASES = 12
QUIET_STEPS_MAX = 2000
"""The most steps without a new token: every adapter has had several turns then."""


class Bench(Rotation):
    """Adapters in turns that end after `PATIENCE` steps, regardless of what they did."""

    def __init__(self, model: CausalModel, root: Path, config: EngineConfig) -> None:
        super().__init__(model, root, config)
        self.patience, self.count, self.random = PATIENCE, 0, random.Random(5)
        self._fields: dict[int, tuple[bool, dict[str, int]]] = {}
        batch = self.scheduler.batch
        if isinstance(batch, PagedBatch):
            sizes = model.vocab_size
            batch._runner.forward = lambda _, __, run, images=(): run()
            batch._packed.forward = lambda rows: torch.zeros(sum(one.logits for one in rows), sizes)
            batch._runner.sample = lambda rows, _: [self.random.randrange(9, 250) for _ in rows]

    def request(
        self, name: str | None, prompt: int, output: int, *, is_fixed: bool = False, **fields: int
    ) -> int:
        """Request `output` tokens after `prompt` tokens.

        is_fixed: what was computed of it can't be computed again, as that of images.
        """
        self.count += 1
        tokens = tuple(self.random.randrange(9, 250) for _ in range(prompt))
        self._fields[self.count] = (is_fixed, fields)
        self.want(self.count, name, tokens, Sampling(max_tokens=output, ignore_eos=True))
        return self.count

    def start(self, name: Any, prompt: Any, sampling: Any = None, **fields: Any) -> int:
        is_fixed, more = self._fields[fields["op"]]
        op = super().start(name, prompt, sampling, **fields, **more)
        generation = self.scheduler._generations.find(fields["op"])
        if is_fixed and generation is not None:
            generation.sequences[0].can_resume = False
        return op

    def step(self) -> None:
        """Let turns end, and run one step."""
        self.rotate()
        self.run(steps=1)
        batch = self.scheduler.batch
        if isinstance(batch, PagedBatch):
            held = {
                block
                for row in (*batch._members, *batch._suspended.values())
                for block in row.table.blocks
            }
            check_pool(batch.pool)
            assert batch.pool.referenced == len(held)

    @property
    def ended(self) -> set[int]:
        return {one.op for one in self.reports if not isinstance(one, TokensStreamed)}

    def finish(self) -> None:
        """Run all requests to their ends; few steps in a row report nothing."""
        quiet, seen = 0, len(self.reports)
        while self._waiting or self.scheduler.operations:
            self.step()
            quiet = 0 if len(self.reports) > seen else quiet + 1
            seen = len(self.reports)
            assert quiet < QUIET_STEPS_MAX, self.scheduler.operations
        assert self.scheduler.suspended == []
        assert self.scheduler.kv_use.size_bytes == 0


@pytest.fixture
def bench_of(prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig) -> Any:
    return lambda **fields: Bench(prepared_model, adapter_root, replace(engine_config, **fields))


@pytest.mark.parametrize("seed", range(CASES))
def test_everything_ends_once_nothing_disturbs_it(seed: int, bench_of: Any) -> None:
    """Requests arrive, steps are run, and requests are stopped, over blocks for one row or more."""
    chance = random.Random(seed)
    bench = bench_of(
        kv_cache_bytes=(ROW_BLOCKS + chance.choice([0, 1, 8])) * BLOCK_BYTES,
        max_num_batched_tokens=chance.choice([4, 8, 64]),
        max_num_seqs=chance.choice([1, 3, 8]),
    )
    for _ in range(30):
        event = chance.random()
        if event < 0.5:
            name, prompt = chance.choice([None, *NAMES]), chance.choice([1, 20, 60, 100])
            is_fixed, priority = chance.random() < 0.4, chance.choice([0, 0, 1, -1])
            output = chance.choice([1, 5, 25])
            bench.request(name, prompt, output, is_fixed=is_fixed, priority=priority)
        elif event < 0.6:
            bench.scheduler.stop(chance.randint(1, 20))
        else:
            for _ in range(chance.randint(1, 30)):
                bench.step()
    bench.finish()


@pytest.mark.parametrize("is_paged", [True, False])
def test_prompts_that_take_longer_than_a_turn_end(bench_of: Any, is_paged: bool) -> None:
    """Three adapters in two slots, over the blocks of one row: each turn takes those of others."""
    bench = bench_of(
        kv_cache_bytes=ROW_BLOCKS * BLOCK_BYTES if is_paged else 0,
        max_num_batched_tokens=1,
        max_num_seqs=2,
        paged_attention=is_paged,
    )
    for name in NAMES[:3]:
        bench.request(name, 100, 3)
    bench.finish()
    assert bench.suspensions > 9


def test_a_request_ends_next_to_a_stream_of_others_that_need_its_blocks(bench_of: Any) -> None:
    """It began before those that come later, so they give up their blocks for it."""
    bench = bench_of(
        kv_cache_bytes=(ROW_BLOCKS + 1) * BLOCK_BYTES, max_num_batched_tokens=2, max_num_seqs=8
    )
    oldest, steps = 0, 0
    while oldest not in bench.ended:
        assert bench.count < 50
        while len(bench.scheduler.operations) < 4 + bool(oldest):
            bench.request(None, 3, 90)
        if steps == 50:
            oldest = bench.request(NAMES[0], 60, 60)
        bench.step()
        steps += 1


def test_a_long_prompt_is_prefilled_next_to_a_stream_of_short_ones(bench_of: Any) -> None:
    for is_paged in (True, False):
        bench = bench_of(paged_attention=is_paged, max_num_batched_tokens=8)
        long = bench.request(None, 100, 2)
        while long not in bench.ended:
            assert bench.count < 100
            bench.request(None, 3, 1)
            bench.step()
