"""Suspended generations of models with other states than keys and values, and of images.

While they are suspended their adapters move to other slots and other rows continue. Their tokens
are those of `transformers`, with PEFT, for each row alone.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.jobs import InlineJobs
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import Blob, stage
from loradock.engine.serving.paged_cache import PagedKVCache
from loradock.engine.serving.queue import SlotTable
from loradock.messages.commands import ResumeGeneration
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling
from loradock.messages.reports import OperationFailed
from tests.support.engine.generation_bench import SchedulerDriver
from tests.support.engine.image_bench import NAMES, ImageBench, PeftReference, PromptRow
from tests.support.models.causal_configs import build_model
from tests.support.models.causal_parity import LENGTHS, RANKS, STEPS, Reference, prompt_of
from tests.support.models.common_fields import POSITIONS
from tests.support.models.image_examples import picture

KINDS = {"lfm2": "StateCache", "minimax": "SingleRows", "recurrent_gemma": "SingleRows"}
"""Each type of model, and the class of the cache that its running rows have."""

IMAGE_ROWS = (
    PromptRow("one", "a @ cat", (picture(20, 12, 1),)),
    PromptRow(None, "what is this? it is a cat and a dog"),
    PromptRow("two", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    PromptRow("two", "the mat"),
    PromptRow("one", "a cat and @", (picture(8, 8, 5),)),
)


def run_in_turns(
    driver: SchedulerDriver, arena: Arena, blobs: Mapping[int, Blob], adapters: Mapping[int, int]
) -> int:
    """Run all generations to their ends; return how often one was suspended.

    Every few steps all adapters leave their slots and then enter others. `blobs`: by adapter id.
    `adapters`: the adapter id of each operation.
    """
    scheduler, residents = driver.scheduler, driver.scheduler._slots.residents
    # Otherwise a row that continues from another one's states could be computed again.
    scheduler.on_preemption = lambda _: pytest.fail("states were not kept")
    places = {adapter_id: (adapter_id - 1, 1) for adapter_id in blobs}
    suspensions, generation = 0, 1
    while True:
        driver.run(steps=3)
        if scheduler.is_idle:
            return suspensions
        if not all(scheduler.has_progressed(*place) for place in places.values()):
            continue
        for slot, before in places.values():
            scheduler.suspend(slot, before)
            arena.reset(slot, before)
            residents[slot] = None
        suspensions += len(scheduler.suspended)
        driver.run(steps=2)
        generation += 1
        for adapter_id, blob in blobs.items():
            slot = (adapter_id + generation) % len(blobs)
            arena.begin_write(slot, generation, blob)
            arena.finish_write(slot)
            residents[slot], places[adapter_id] = adapter_id, (slot, generation)
        for op in scheduler.suspended:
            scheduler.resume(ResumeGeneration(900 + op, op, *places[adapters[op]]))


@pytest.mark.parametrize("model_type", KINDS)
def test_rows_with_states_are_suspended_with_them(model_type: str, tmp_path: Path) -> None:
    reference = Reference(model_type, tmp_path)
    wanted = LoRAConfig(max_lora_rank=64, max_loras=len(RANKS), lora_dtype="float32")
    model = CausalModel(build_model(model_type), wanted, context_tokens_max=POSITIONS)
    arena, punica, lora_config = bind_lora(model, wanted, 4 << 20)
    blobs = {}
    for slot, name in enumerate(RANKS):
        loaded = read_adapter(name, [tmp_path], model.adapter_target(lora_config))
        blobs[slot + 1] = stage(loaded.model, model.shapes, lora_config.dtype, False)
        arena.begin_write(slot, 1, blobs[slot + 1])
        arena.finish_write(slot)
    slots = SlotTable(arena, [slot + 1 for slot in range(len(RANKS))])
    config = EngineConfig(Path(), device="cpu", max_num_seqs=8, max_num_batched_tokens=16)
    driver = SchedulerDriver(model, punica, slots, config, list(RANKS), InlineJobs())
    assert type(driver.scheduler.batch._cache).__name__ == KINDS[model_type]
    names = reference.names
    rows = [(names[row % len(names)], prompt_of(row, length)) for row, length in enumerate(LENGTHS)]
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    ops = {driver.start(*row, sampling): row for row in rows}
    adapters = {op: names.index(name) for op, (name, _) in ops.items()}
    assert run_in_turns(driver, arena, blobs, adapters) > 2 * len(rows)
    for op, row in ops.items():
        assert driver.output(op)[0] == reference.generate(*row)[1], row
    assert driver.scheduler.kv_use.size_bytes == 0


@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_prompts_with_images_are_suspended_and_not_read_again(
    kind: str, is_paged: bool, tmp_path: Path
) -> None:
    reference, bench = PeftReference(kind, tmp_path), ImageBench(kind, tmp_path)
    blobs = {}
    for number, name in enumerate(NAMES):
        target = bench.model.adapter_target(bench.config)
        loaded = read_adapter(name, [tmp_path / "adapters"], target)
        blobs[number + 1] = stage(loaded.model, bench.model.shapes, torch.float32, False)
    driver = bench.driver(max_num_seqs=8, paged_attention=is_paged)
    sampling = Sampling(max_tokens=24)
    ops = {driver.start(row.adapter, bench.prompt(row), sampling): row for row in IMAGE_ROWS}
    ids = {None: 0, **{name: number + 1 for number, name in enumerate(NAMES)}}
    adapters = {op: ids[row.adapter] for op, row in ops.items()}
    assert run_in_turns(driver, bench.arena, blobs, adapters) > len(IMAGE_ROWS)
    assert driver.scheduler.kv_use.layout == ("paged" if is_paged else "padded")
    for op, row in ops.items():
        assert driver.output(op)[0] == reference.greedy(row, 24), row.text
    assert driver.scheduler.kv_use.size_bytes == 0


def test_a_prompt_with_images_takes_the_blocks_of_suspended_sequences(tmp_path: Path) -> None:
    """It needs all its blocks at once, and there are those of one sequence."""
    reference, bench = PeftReference("llava", tmp_path), ImageBench("llava", tmp_path)
    driver = bench.driver(max_num_seqs=1)
    tokens = tuple(range(50, 250))
    suspended = driver.start("one", tokens, Sampling(max_tokens=9))
    driver.run(steps=5)
    driver.scheduler.suspend(0, 1)
    pool, row = driver.scheduler.batch.pool, IMAGE_ROWS[2]
    assert pool.available < pool.referenced
    op = driver.start(row.adapter, bench.prompt(row), Sampling(max_tokens=100))
    driver.run()
    assert driver.output(op)[0] == reference.greedy(row, 100)
    driver.scheduler.resume(ResumeGeneration(99, suspended, 0, 1))
    driver.run()
    assert driver.output(suspended)[0] == driver.alone("one", tokens, Sampling(max_tokens=9))[0]


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_suspended_prompt_with_images_loses_its_blocks_and_continues(
    is_resumed: bool, tmp_path: Path
) -> None:
    """Its adapter is in a slot again, or not, while another request needs nearly all blocks."""
    reference, bench = PeftReference("llava", tmp_path), ImageBench("llava", tmp_path)
    driver, row, tokens = bench.driver(max_num_seqs=1), IMAGE_ROWS[2], tuple(range(50, 250))
    suspended = driver.start(row.adapter, bench.prompt(row), Sampling(max_tokens=100))
    driver.run(steps=5)
    driver.scheduler.suspend(1, 1)
    op = driver.start("one", tokens, Sampling(max_tokens=9))
    if is_resumed:
        driver.run(steps=3)
        driver.scheduler.resume(ResumeGeneration(99, suspended, 1, 1))
    driver.run()
    driver.scheduler.resume(ResumeGeneration(99, suspended, 1, 1))
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
    row, tokens = IMAGE_ROWS[2], tuple(range(50, 250))
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
    driver.scheduler.suspend(1, 1)
    op = driver.start("one", tokens, Sampling(max_tokens=9))
    driver.run()
    driver.scheduler.resume(ResumeGeneration(99, suspended, 1, 1))
    driver.run()
    failed = driver.end(suspended)
    assert isinstance(failed, OperationFailed)
    assert failed.code is ErrorCode.DEVICE_OUT_OF_MEMORY
    assert driver.output(op)[0] == driver.alone("one", tokens, Sampling(max_tokens=9))[0]
    assert (driver.scheduler.suspended, driver.scheduler.kv_use.size_bytes) == ([], 0)
