"""Suspended generations end as if they ran alone, and no request waits forever."""

import itertools
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.padded_batch import PaddedBatch, PrefillBatch
from loradock.engine.serving.paged_batch import PagedBatch
from loradock.engine.serving.paged_cache import PagedKVCache
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling, Structure
from loradock.messages.reports import GenerationEnded, OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.block_memory import check_pool
from tests.support.engine.generation_bench import NAMES, PROMPTS, GenerationBench, SchedulerDriver
from tests.support.engine.image_bench import ROWS, ImageBench, PeftReference
from tests.support.engine.slot_turns import Rotation
from tests.support.models.causal_configs import build_model
from tests.support.models.causal_parity import LENGTHS, RANKS, STEPS, Reference, prompt_of
from tests.support.models.common_fields import POSITIONS

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
    paged: bool, bench_of: Any
) -> None:
    bench = bench_of(paged_attention=paged)
    op = bench.start(NAMES[0], PROMPTS[1], Sampling(max_tokens=50, ignore_eos=True))
    assert not bench.scheduler.is_turn_over(0, 1, 1)
    bench.run(steps=4)
    assert bench.scheduler.is_turn_over(0, 1, 1)
    bench.suspend(0, 1)
    assert (bench.scheduler.is_idle, bench.scheduler.suspended) == (True, [op])
    assert bench.scheduler.operations == [op]
    assert bench.scheduler.kv_use.size_bytes > 0
    bench.scheduler.stop(op)
    end = bench.end(op)
    assert isinstance(end, GenerationEnded)
    assert (end.finish_reason, end.output_tokens) == ("cancelled", len(bench.output(op)[0]))
    assert (bench.scheduler.suspended, bench.scheduler.kv_use.size_bytes) == ([], 0)
    bench.write_again(0)
    bench.scheduler.collect()
    assert bench.scheduler.is_idle


def test_a_resumed_generation_whose_slot_is_lost_fails_and_frees_its_memory(
    bench_of: Any, no_eos: None
) -> None:
    bench = bench_of()
    op = bench.start(NAMES[0], PROMPTS[1], Sampling(max_tokens=50))
    bench.run(steps=4)
    bench.suspend(0, 1)
    bench.write_again(0)
    bench.run(steps=1)
    bench.clear(0, 2)
    bench.run()
    assert isinstance(bench.end(op), OperationFailed)
    assert bench.scheduler.kv_use.size_bytes == 0


@pytest.mark.parametrize("paged", [True, False])
def test_the_oldest_of_an_adapters_generations_continues_first(
    paged: bool,
    bench_of: Any,
    no_eos: None,
) -> None:
    bench = bench_of(paged_attention=paged, max_num_seqs=1)
    ops = [bench.start(NAMES[0], PROMPTS[1], Sampling(max_tokens=50)) for _ in range(3)]
    bench.run(steps=4)
    bench.suspend(0, 1)
    bench.write_again(0)
    for op in ops:
        bench.run(steps=1)
        assert bench.scheduler.running == [op]
        bench.scheduler.stop(op)


def test_a_suspended_generation_keeps_blocks_that_would_be_too_few_for_another(
    bench_of: Any,
) -> None:
    """Of 16 blocks 3 are suspended and 7 in use; a prompt of 8 waits for those in use."""
    bench = bench_of(
        kv_cache_bytes=16 * BLOCK_BYTES, max_num_batched_tokens=64, prefix_caching=False
    )
    bench.start(NAMES[0], tuple(range(40)), Sampling(max_tokens=20, ignore_eos=True))
    bench.run(steps=2)
    bench.suspend(0, 1)
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
def rotation_of(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> Any:
    return lambda **fields: Bench(prepared_model, adapter_root, replace(engine_config, **fields))


@pytest.mark.parametrize("seed", range(CASES))
def test_everything_ends_once_nothing_disturbs_it(seed: int, rotation_of: Any) -> None:
    """Requests arrive, steps are run, and requests are stopped, over blocks for one row or more."""
    chance = random.Random(seed)
    bench = rotation_of(
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
def test_prompts_that_take_longer_than_a_turn_end(rotation_of: Any, is_paged: bool) -> None:
    """Three adapters in two slots, over the blocks of one row: each turn takes those of others."""
    bench = rotation_of(
        kv_cache_bytes=ROW_BLOCKS * BLOCK_BYTES if is_paged else 0,
        max_num_batched_tokens=1,
        max_num_seqs=2,
        paged_attention=is_paged,
    )
    for name in NAMES[:3]:
        bench.request(name, 100, 3)
    bench.finish()
    assert bench.suspensions > 9


def test_a_request_ends_next_to_a_stream_of_others_that_need_its_blocks(rotation_of: Any) -> None:
    """It began before those that come later, so they give up their blocks for it."""
    bench = rotation_of(
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


@pytest.mark.parametrize("order", [(2, 1), (2, 1, 3), (3, 2, 1), (4, 3, 2, 1)])
@pytest.mark.parametrize(("turn_tokens", "is_fixed"), [(1, False), (8, False), (8, True)])
def test_the_oldest_has_the_tokens_of_a_turn_in_each_though_one_row_fits(
    turn_tokens: int, is_fixed: bool, order: tuple[int, ...], rotation_of: Any
) -> None:
    """All turns end together, the others have streams of requests, and enter their slots first.

    order: that of the adapters' first turns, of which adapter 1 has the oldest request. is_fixed:
    whether what was computed of the others can't be computed again.
    """
    bench = rotation_of(
        kv_cache_bytes=ROW_BLOCKS * BLOCK_BYTES, max_num_batched_tokens=8, max_num_seqs=4
    )
    bench.turn_tokens, output, turns = turn_tokens, 17, 0
    running = {name: bench.request(name, 60, output) for name in NAMES[: len(order)]}
    oldest = running[NAMES[0]]
    bench._waiting = deque(order)
    was_suspended = False
    while oldest not in bench.ended:
        bench.step()
        assert bench.count < 50
        is_suspended = oldest in bench.scheduler.suspended
        turns += is_suspended and not was_suspended
        was_suspended = is_suspended
        for name in NAMES[1 : len(order)]:
            if running[name] in bench.ended:
                running[name] = bench.request(name, 60, output, is_fixed=is_fixed)
    # A turn can end after its `PATIENCE` while another adapter's prompt has the memory.
    assert turns <= 2 * -(-output // turn_tokens)


def test_a_long_prompt_is_prefilled_next_to_a_stream_of_short_ones(rotation_of: Any) -> None:
    for is_paged in (True, False):
        bench = rotation_of(paged_attention=is_paged, max_num_batched_tokens=8)
        long = bench.request(None, 100, 2)
        while long not in bench.ended:
            assert bench.count < 100
            bench.request(None, 3, 1)
            bench.step()


KINDS = {"lfm2": "StateCache", "minimax": "SingleRows", "recurrent_gemma": "SingleRows"}

"""Each type of model, and the class of the cache that its running rows have."""


def run_in_moving_slots(driver: SchedulerDriver) -> int:
    """Run all generations to their ends; return how often one was suspended.

    Every few steps all adapters leave their slots and then enter others.
    """
    scheduler, blobs = driver.scheduler, driver.blobs
    # Otherwise a row that continues from another one's states could be computed again.
    scheduler.on_preemption = lambda _: pytest.fail("states were not kept")
    places = {adapter_id: (adapter_id - 1, 1) for adapter_id in blobs}
    suspensions, generation = 0, 1
    while True:
        driver.run(steps=3)
        if scheduler.is_idle:
            return suspensions
        if not all(scheduler.is_turn_over(*place, 1) for place in places.values()):
            continue
        for slot, before in places.values():
            driver.suspend(slot, before)
        suspensions += len(scheduler.suspended)
        driver.run(steps=2)
        generation += 1
        for adapter_id in blobs:
            slot = (adapter_id + generation) % len(blobs)
            driver.write(slot, adapter_id, generation)
            places[adapter_id] = slot, generation


@pytest.mark.parametrize("model_type", KINDS)
def test_rows_with_states_are_suspended_with_them(model_type: str, tmp_path: Path) -> None:
    reference = Reference(model_type, tmp_path)
    wanted = LoRAConfig(max_lora_rank=64, max_loras=len(RANKS), lora_dtype="float32")
    model = CausalModel(build_model(model_type), wanted, max_model_len=POSITIONS)
    config = EngineConfig(Path(), device="cpu", max_num_seqs=8, max_num_batched_tokens=16)
    bench = GenerationBench(model, tmp_path, config, tuple(RANKS), max_lora_rank=64)
    assert type(bench.scheduler.batch._cache).__name__ == KINDS[model_type]
    names = reference.names
    rows = [(names[row % len(names)], prompt_of(row, length)) for row, length in enumerate(LENGTHS)]
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    ops = {bench.start(*row, sampling): row for row in rows}
    assert run_in_moving_slots(bench) > 2 * len(rows)
    for op, row in ops.items():
        assert bench.output(op)[0] == reference.generate(*row)[1], row
    assert bench.scheduler.kv_use.size_bytes == 0


@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_prompts_with_images_are_suspended_and_not_read_again(
    kind: str, is_paged: bool, tmp_path: Path
) -> None:
    reference, bench = PeftReference(kind, tmp_path), ImageBench(kind, tmp_path)
    driver = bench.driver(max_num_seqs=8, paged_attention=is_paged)
    sampling = Sampling(max_tokens=24)
    ops = {driver.start(row.adapter, bench.prompt(row), sampling): row for row in ROWS}
    assert run_in_moving_slots(driver) > len(ROWS)
    assert driver.scheduler.kv_use.layout == ("paged" if is_paged else "padded")
    for op, row in ops.items():
        assert driver.output(op)[0] == reference.greedy(row, 24), row.text
    assert driver.scheduler.kv_use.size_bytes == 0


def test_a_prompt_with_images_takes_the_blocks_of_suspended_sequences(tmp_path: Path) -> None:
    """It needs all its blocks at once, and there are those of one sequence."""
    reference, bench = PeftReference("llava", tmp_path), ImageBench("llava", tmp_path)
    driver = bench.driver(max_num_seqs=1)
    tokens = tuple(range(50, 250))
    alone = bench.driver(max_num_seqs=1).alone("one", tokens, Sampling(max_tokens=9))
    suspended = driver.start("one", tokens, Sampling(max_tokens=9))
    driver.run(steps=5)
    driver.suspend(0, 1)
    pool, row = driver.scheduler.batch.pool, ROWS[2]
    assert pool.available < pool.referenced
    op = driver.start(row.adapter, bench.prompt(row), Sampling(max_tokens=100))
    driver.run()
    assert driver.output(op)[0] == reference.greedy(row, 100)
    driver.write_again(0)
    driver.run()
    assert driver.output(suspended) == alone


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_suspended_prompt_with_images_loses_its_blocks_and_continues(
    is_resumed: bool, tmp_path: Path
) -> None:
    """Its adapter is in a slot again, or not, while another request needs nearly all blocks."""
    reference, bench = PeftReference("llava", tmp_path), ImageBench("llava", tmp_path)
    driver, row, tokens = bench.driver(max_num_seqs=1), ROWS[2], tuple(range(50, 250))
    suspended = driver.start(row.adapter, bench.prompt(row), Sampling(max_tokens=100))
    driver.run(steps=5)
    driver.suspend(1, 1)
    op = driver.start("one", tokens, Sampling(max_tokens=9))
    if is_resumed:
        driver.run(steps=3)
        driver.write_again(1)
    driver.run()
    if not is_resumed:
        driver.write_again(1)
        driver.run()
    assert driver.output(suspended)[0] == reference.greedy(row, 100)
    assert driver.output(op)[0] == driver.alone("one", tokens, Sampling(max_tokens=9))[0]
    assert driver.scheduler.kv_use.size_bytes == 0


def no_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("none")


@pytest.mark.parametrize(("is_paged", "copies"), [(True, "read"), (True, "write"), (False, "take")])
def test_a_suspended_prompt_with_images_fails_alone_where_memory_lacks(
    is_paged: bool, copies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its blocks are needed or written again, or its row of a padded cache is taken out."""
    PeftReference("llava", tmp_path)
    bench = ImageBench("llava", tmp_path)
    driver = bench.driver(max_num_seqs=1 if is_paged else 3, paged_attention=is_paged)
    row, tokens = ROWS[2], tuple(range(50, 250))
    sampling = Sampling(max_tokens=100, n=1 if is_paged else 2, temperature=0.5, seed=1)
    suspended = driver.start(row.adapter, bench.prompt(row), sampling)
    driver.run(steps=5)
    owner = PagedKVCache if is_paged else type(driver.scheduler.batch._cache)
    run, calls = getattr(owner, copies), itertools.count()

    def failing_first(*arguments: object) -> object:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("none")
        return run(*arguments)

    monkeypatch.setattr(owner, copies, failing_first)
    driver.suspend(1, 1)
    op = driver.start("one", tokens, Sampling(max_tokens=9))
    driver.run()
    driver.write_again(1)
    driver.run()
    failed = driver.end(suspended)
    assert isinstance(failed, OperationFailed)
    assert failed.code is ErrorCode.DEVICE_OUT_OF_MEMORY
    assert driver.output(op)[0] == driver.alone("one", tokens, Sampling(max_tokens=9))[0]
    assert (driver.scheduler.suspended, driver.scheduler.kv_use.size_bytes) == ([], 0)
