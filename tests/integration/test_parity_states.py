"""Rows of models with other states than keys and values are PEFT's: one of each kind.

`make parity` compares all architectures.
"""

from pathlib import Path

import pytest

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.row_cache import RowStates
from loradock.engine.serving import prefix_states
from loradock.engine.serving.blocks import BLOCK_TOKENS
from loradock.messages.prompts import Sampling
from tests.support.engine.generation_bench import GenerationBench
from tests.support.models.causal_configs import build_model
from tests.support.models.causal_parity import (
    ERROR_MAX,
    LENGTHS,
    RANKS,
    STEPS,
    Reference,
    judge_manager,
    judge_server,
    prompt_of,
)
from tests.support.models.common_fields import POSITIONS

KINDS = {"lfm2": "together", "minimax": "single", "recurrent_gemma": "single"}
"""A convolution's state and keys decoded together; a cache that only the model itself knows; states
that the model keeps in its modules.
"""

HYBRIDS = ("bamba", "lfm2", "qwen3_next", "recurrent_gemma")
"""States of a state space, a convolution, a gated delta rule, and in the model's modules."""

OWN_ORDERS = ("xlnet", "prophetnet")
"""Layers that see [tokens, rows]; a head that sees several streams of each row."""


@pytest.mark.parametrize("model_type", KINDS)
def test_rows_with_states_match_peft_in_process_and_served(model_type: str, tmp_path: Path) -> None:
    reference, modes = Reference(model_type, tmp_path), []
    assert judge_manager(model_type, tmp_path, reference) < ERROR_MAX
    assert judge_server(model_type, tmp_path, reference, modes) < ERROR_MAX
    assert modes == [KINDS[model_type]]
    assert_scheduled_rows_match(model_type, tmp_path, reference)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_prompts_that_begin_with_stored_states_match_peft(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_states, "STORED_TOKENS_MIN", BLOCK_TOKENS)
    reference = Reference(model_type, tmp_path)
    driver = bench_of(model_type, tmp_path)
    shared, sampling = prompt_of(1, 2 * BLOCK_TOKENS), Sampling(max_tokens=4, ignore_eos=True)
    name, other = reference.names[1:3]
    ends = [prompt_of(row, length) for row, length in ((2, 17), (3, 18), (4, 9), (5, 3))]
    reused = []
    # The second prompt stores the states of what it shares with the first. Prompts after it begin
    # with them, also in one group, but none of another adapter, and no shorter one.
    waves = [
        [(name, shared + ends[0])],
        [(name, shared + ends[1])],
        [(name, shared + ends[2]), (name, shared + ends[3]), (other, shared + ends[2])],
        [(name, shared + ends[2] + ends[3]), (name, shared[:20])],
    ]
    for rows in waves:
        ops = [driver.start(*row, sampling) for row in rows]
        driver.run()
        for op, row in zip(ops, rows, strict=True):
            assert driver.output(op)[0] == reference.generate(*row)[1][:4], row
            reused.append(driver.end(op).prefix_tokens)
    assert reused == [0, 0, 32, 32, 0, 32, 0]
    assert driver.scheduler.kv_use.shares_prefixes


@pytest.mark.parametrize("fails", ["copy_states", "restore"])
def test_prompts_are_computed_whole_if_memory_lacks_for_states(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(prefix_states, "STORED_TOKENS_MIN", BLOCK_TOKENS)
    reference = Reference("lfm2", tmp_path)
    driver = bench_of("lfm2", tmp_path)
    monkeypatch.setattr(RowStates, fails, lack)
    row = (reference.names[1], prompt_of(1, 2 * BLOCK_TOKENS + 1))
    for _ in range(2):
        op = driver.start(*row, Sampling(max_tokens=4, ignore_eos=True))
        driver.run()
        assert driver.output(op)[0] == reference.generate(*row)[1][:4]
        assert driver.end(op).prefix_tokens == 0


@pytest.mark.parametrize("model_type", OWN_ORDERS)
def test_rows_in_an_order_of_the_model_match_peft_in_process(
    model_type: str, tmp_path: Path
) -> None:
    reference = Reference(model_type, tmp_path)
    assert judge_manager(model_type, tmp_path, reference) < ERROR_MAX


def assert_scheduled_rows_match(model_type: str, root: Path, reference: Reference) -> None:
    """Rows that wait, join, are preempted and leave have the tokens of `generate`."""
    driver = bench_of(model_type, root)
    names = reference.names
    rows = [(names[row % len(names)], prompt_of(row, length)) for row, length in enumerate(LENGTHS)]
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    ops = [driver.start(*row, sampling) for row in rows]
    scheduler = driver.scheduler
    while not scheduler.batch.running:
        driver.run(steps=1)
    assert scheduler.kv_use.size_bytes > 0
    preempted = scheduler.batch.running[:1]
    scheduler.batch.keep(lambda one: one not in preempted)
    scheduler.on_preemption(preempted)
    driver.run()
    assert scheduler.kv_use.size_bytes == 0
    for op, row in zip(ops, rows, strict=True):
        assert driver.output(op)[0] == reference.generate(*row)[1], row


def bench_of(model_type: str, root: Path) -> GenerationBench:
    wanted = LoRAConfig(max_lora_rank=64, max_loras=len(RANKS), lora_dtype="float32")
    model = CausalModel(build_model(model_type), wanted, max_model_len=POSITIONS)
    config = EngineConfig(Path(), device="cpu", max_num_seqs=3, max_num_batched_tokens=16)
    return GenerationBench(model, root, config, tuple(RANKS), max_lora_rank=64)
