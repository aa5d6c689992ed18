"""Continuous batching: a sequence does not depend on the rest of its batch and fails alone."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from loradock.engine.config import EngineConfig
from loradock.engine.errors import EngineError
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import PunicaWrapper
from loradock.engine.serving import padded_batch
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling
from loradock.messages.reports import GenerationEnded, OperationFailed
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)


@pytest.fixture
def bench(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> GenerationBench:
    return GenerationBench(prepared_model, adapter_root, engine_config)


def test_greedy_output_equals_transformers_with_peft(
    bench: GenerationBench, peft_models: dict[str, PeftModel]
) -> None:
    for name, model in peft_models.items():
        tokens, _ = bench.alone(name, PROMPTS[1])
        ids = torch.tensor([PROMPTS[1]])
        whole = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        expected = whole[0, len(PROMPTS[1]) :].tolist()
        assert tokens == [token for token in expected if token not in bench.model.eos_ids]


def test_a_mixed_batch_equals_its_requests_one_by_one(bench: GenerationBench) -> None:
    alone = [bench.alone(name, prompt) for name, prompt in REQUESTS]
    assert bench.outputs(REQUESTS) == alone
    assert len({tuple(tokens) for tokens, _ in alone}) > len(REQUESTS) // 2


def test_sequences_that_join_and_leave_do_not_change_the_others(
    bench: GenerationBench, no_eos: None
) -> None:
    lengths = [3, 14, 1, 9, 5, 16, 2, 7]
    requests = [
        (*REQUESTS[at % len(REQUESTS)], Sampling(max_tokens=lengths[at % 8])) for at in range(24)
    ]
    alone = [bench.alone(*request) for request in requests]
    outputs = bench.outputs(requests, steps_between=2)
    assert outputs == alone
    assert [len(tokens) for tokens, _ in outputs] == [request[2].max_tokens for request in requests]


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_batch_is_bounded_in_sequences_and_prefill_tokens(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
    is_paged: bool,
) -> None:
    config = replace(
        engine_config, max_num_seqs=3, paged_attention=is_paged, max_num_batched_tokens=12
    )
    bench = GenerationBench(prepared_model, adapter_root, config)
    expected = [bench.alone(*request) for request in REQUESTS]
    passes: list[list[int]] = []
    bench.intercept(monkeypatch, lambda tokens, run: passes.append(tokens) or run())
    monkeypatch.setattr(padded_batch, "PREFILL_TOKENS_MAX", 12)
    assert bench.outputs(REQUESTS) == expected
    assert max(map(len, passes)) == 3
    assert max(map(sum, passes)) <= 12


def test_a_seed_yields_the_same_tokens_in_any_batch(bench: GenerationBench, no_eos: None) -> None:
    def sampling(seed: int) -> Sampling:
        return Sampling(max_tokens=16, temperature=1.5, top_k=40, top_p=0.95, seed=seed)

    alone = [bench.alone("mlp", PROMPTS[0], sampling(seed)) for seed in range(6)]
    assert len({tuple(tokens) for tokens, _ in alone}) == 6
    ops = []
    for seed in range(6):
        ops.append(bench.start("mlp", PROMPTS[0], sampling(seed)))
        bench.start(None, PROMPTS[1], Sampling(max_tokens=5, temperature=1.0))
        bench.run(steps=1)
    bench.run()
    assert [bench.output(op) for op in ops] == alone


@pytest.mark.parametrize(
    "fields",
    [
        {"generation": 2},
        {"generation": 0},
        {"slot": 1},
        {"slot": -1},
        {"slot": len(NAMES)},
        {"slot": 65_535},
        {"adapter_id": 0},
        {"adapter_id": 2},
    ],
)
def test_a_start_that_names_another_slot_generation_or_adapter_is_refused(
    bench: GenerationBench, fields: dict[str, int]
) -> None:
    with pytest.raises(EngineError) as caught:
        bench.start(NAMES[0], PROMPTS[0], **fields)
    assert caught.value.code == ErrorCode.NOT_RESIDENT
    assert bench.scheduler.is_idle


def test_padding_is_mapped_to_the_base_model(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
) -> None:
    config = replace(engine_config, paged_attention=False)
    bench = GenerationBench(prepared_model, adapter_root, config)
    mappings = []
    update = PunicaWrapper.update_metadata
    monkeypatch.setattr(
        PunicaWrapper,
        "update_metadata",
        lambda self, mapping, layout: mappings.append(mapping) or update(self, mapping, layout),
    )
    for name in (NAMES[2], None, NAMES[0]):
        for prompt in PROMPTS:
            bench.start(name, prompt, Sampling(max_tokens=2))
    bench.run()
    prefill, decode = mappings
    own = [3] * sum(map(len, PROMPTS)) + [1] * sum(map(len, PROMPTS))
    assert sorted(prefill.index_mapping[prefill.index_mapping > 0].tolist()) == sorted(own)
    assert decode.index_mapping.tolist() == [3] * 4 + [0] * 4 + [1] * 4
    assert torch.equal(prefill.prompt_mapping, decode.prompt_mapping)


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_rewritten_slot_fails_only_its_own_sequences(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    no_eos: None,
    rewritten: bool,
) -> None:
    bench = GenerationBench(prepared_model, adapter_root, replace(engine_config, max_num_seqs=6))
    names = (NAMES[1], None, NAMES[2], NAMES[1], NAMES[0], NAMES[3], NAMES[1])
    expected = [bench.alone(name, PROMPTS[1]) for name in names]
    ops = [bench.start(name, PROMPTS[1]) for name in names[:-1]]
    bench.run(steps=4)
    streamed = len(bench.output(ops[0])[0])
    assert 0 < streamed < 16
    # No row is free for this one, which is still in the queue.
    ops.append(bench.start(names[-1], PROMPTS[1]))
    bench.arena.reset(1, 1)
    bench.residents[1] = None
    if rewritten:
        bench.write(1, 2, 2)
    bench.run()
    for name, op, (tokens, text) in zip(names, ops, expected, strict=True):
        end = bench.end(op)
        if name == NAMES[1]:
            assert isinstance(end, OperationFailed)
            assert end.code == ErrorCode.NOT_RESIDENT
            assert bench.output(op)[0] == ([] if op == ops[-1] else tokens[:streamed])
        else:
            assert end == GenerationEnded(op, "length", len(PROMPTS[1]), 16)
            assert bench.output(op) == (tokens, text)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_sequence(
    bench: GenerationBench,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
    value: float,
    temperature: float,
) -> None:
    def second_row_overwritten(_: list[int], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        logits = run().clone()
        # One forbidden token must not fail the sequence.
        logits[0, 7] = -torch.inf
        logits[1:, slice(None) if value == -torch.inf else 7] = value
        return logits

    bench.intercept(monkeypatch, second_row_overwritten)
    ops = [
        bench.start(None, PROMPTS[0], Sampling(max_tokens=4, temperature=temperature))
        for _ in range(2)
    ]
    bench.run()
    assert isinstance(bench.end(ops[0]), GenerationEnded)
    assert isinstance(end := bench.end(ops[1]), OperationFailed)
    assert end.code == ErrorCode.NOT_FINITE


def test_an_adapter_that_overflows_fails_only_its_own_sequences(
    bench: GenerationBench, no_eos: None
) -> None:
    expected = bench.alone(None, PROMPTS[0])
    sampled = Sampling(max_tokens=16, temperature=1.0)
    ops = [
        bench.start(NAMES[0], PROMPTS[0]),
        bench.start(None, PROMPTS[0]),
        bench.start(NAMES[0], PROMPTS[0], sampled),
    ]
    bench.run(steps=2)
    head = columns_of_one_adapter(bench.model.shapes)[-1]
    b = torch.full((head.out_features, 1), 3e38)
    bench.arena.write_slice(0, head.index, torch.full((1, head.in_features), 3e38), b)
    bench.run()
    for op in (ops[0], ops[2]):
        assert isinstance(end := bench.end(op), OperationFailed)
        assert end.code == ErrorCode.NOT_FINITE
    assert bench.output(ops[1]) == expected


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_forward_without_memory_fails_only_its_own_sequences(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch, no_eos: None, at: int
) -> None:
    expected = bench.alone("mlp", PROMPTS[1])
    calls = 0

    def failing(_: list[int], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("out of memory")
        return run()

    bench.intercept(monkeypatch, failing)
    first = bench.start("mlp", PROMPTS[0])
    bench.run()
    assert isinstance(end := bench.end(first), OperationFailed)
    assert end.code == ErrorCode.DEVICE_OUT_OF_MEMORY
    assert bench.alone("mlp", PROMPTS[1]) == expected


def test_a_prefill_without_memory_does_not_affect_running_sequences(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch, no_eos: None
) -> None:
    expected = [bench.alone("mlp", prompt) for prompt in (PROMPTS[1], PROMPTS[0])]

    def failing(tokens: list[int], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if sum(count > 1 for count in tokens) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return run()

    bench.intercept(monkeypatch, failing)
    running = bench.start("mlp", PROMPTS[1])
    bench.run(steps=3)
    late = [bench.start("mlp", PROMPTS[0]) for _ in range(2)]
    bench.run()
    # The two that lacked memory together are prefilled again, one at a time.
    assert [bench.output(op) for op in (running, *late)] == [expected[0], *2 * expected[1:]]


def test_a_failed_forward_releases_its_tensors_at_once(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def failing(tokens: list[int], _: Callable[[], torch.Tensor]) -> torch.Tensor:
        activations = torch.tensor(tokens)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("out of memory")

    bench.intercept(monkeypatch, failing)
    op = bench.start("mlp", PROMPTS[0])
    # A reference cycle would keep them until the next collection.
    gc.disable()
    try:
        bench.run()
        assert [tensor() for tensor in held] == [None]
    finally:
        gc.enable()
    assert isinstance(bench.end(op), OperationFailed)
