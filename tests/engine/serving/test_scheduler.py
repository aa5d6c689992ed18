"""Continuous batching: a sequence does not depend on the rest of its batch and fails alone."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from examples.tiny_recipe import build_tokenizer
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import EngineError
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.models.loading import load_model
from loradock.engine.punica import PunicaWrapper
from loradock.engine.serving import padded_batch, scheduler
from loradock.engine.serving.padded_batch import WIDTH_PADDED_MAX, may_join
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling
from loradock.messages.reports import GenerationEnded, OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.engine_examples import ADAPTERS, tiny_config
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, GenerationBench
from tests.support.models.peft_adapters import save_adapter

pytest_plugins = ("tests.support.engine.engine_fixtures",)


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
    bench_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
    is_paged: bool,
) -> None:
    bench = bench_of(max_num_seqs=3, paged_attention=is_paged, max_num_batched_tokens=12)
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
    bench_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
) -> None:
    bench = bench_of(paged_attention=False)
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
    bench_of: Any,
    no_eos: None,
    rewritten: bool,
) -> None:
    bench = bench_of(max_num_seqs=6)
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
    assert isinstance(end := bench.end(op), OperationFailed)
    assert end.code == ErrorCode.DEVICE_OUT_OF_MEMORY


LONG = tuple(7 * index % 250 for index in range(60))

MIXED = [(name, prompt) for prompt in (LONG, LONG[:41], *PROMPTS) for name in (None, *NAMES[:2])]


def test_chunks_change_no_token(bench_of: Any, no_eos: None) -> None:
    whole = bench_of(max_num_batched_tokens=4096)
    expected = [whole.alone(*request) for request in MIXED]
    for tokens in (1, 3, 16, 50):
        chunked = bench_of(max_num_batched_tokens=tokens)
        assert chunked.scheduler.batch.budget.chunks
        assert chunked.outputs(MIXED, steps_between=1) == expected


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory, engine_config: EngineConfig) -> Any:
    """The model and the adapters of a context of 8,192 tokens, and a configuration for them."""
    root = tmp_path_factory.mktemp("long")
    torch.manual_seed(7)
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 8192}
    base = LlamaForCausalLM(tiny_config(**sizes))
    base.save_pretrained(root / "model")
    build_tokenizer().save_pretrained(root / "model")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        save_adapter(copy.deepcopy(base), root / name, seed, task_type="CAUSAL_LM", **fields)
    config = replace(engine_config, model_directory=root / "model", adapter_roots=(root,))
    return load_model(config, LoRAConfig(max_lora_rank=16)), root, config


BUDGET = 256


@pytest.mark.parametrize("is_paged", [True, False])
def test_streaming_rows_take_part_in_every_step_of_a_prompt_of_8000_tokens(
    long_context: Any, monkeypatch: pytest.MonkeyPatch, is_paged: bool
) -> None:
    model, root, config = long_context
    fields = {"max_num_batched_tokens": BUDGET, "paged_attention": is_paged}
    bench = GenerationBench(model, root, replace(config, **fields))
    streaming = Sampling(max_tokens=100, ignore_eos=True)
    names = (None, *NAMES[:3])
    expected = [bench.alone(name, PROMPTS[1], streaming) for name in names]
    passes: list[list[int]] = []
    bench.intercept(monkeypatch, lambda tokens, run: passes.append(tokens) or run())
    running = [bench.start(name, PROMPTS[1], streaming) for name in names]
    bench.run(steps=3)
    long = bench.start(NAMES[3], tuple(7 * at % 250 for at in range(8000)), Sampling(max_tokens=2))
    done = steps = 0
    while not bench.output(long)[0]:
        before = [len(bench.output(op)[0]) for op in running]
        passes.clear()
        bench.run(steps=1)
        steps += 1
        computed = [count for one in passes for count in one]
        # A padded batch decodes in a pass of its own, whose tokens the budget has, too.
        assert sum(computed) <= BUDGET
        assert [len(bench.output(op)[0]) for op in running] == [count + 1 for count in before]
        done += max(computed)
    assert done == 8000
    assert steps == -(-8000 // (BUDGET - len(running)))
    bench.run()
    assert [bench.output(op) for op in running] == expected


def test_a_short_prompt_overtakes_a_long_one(bench_of: Any, no_eos: None) -> None:
    bench = bench_of(max_num_batched_tokens=4)
    long = bench.start("mlp", LONG)
    bench.run(steps=2)
    short = bench.start(None, PROMPTS[0])
    bench.run(steps=3)
    assert bench.output(short)[0]
    assert not bench.output(long)[0]


@pytest.mark.parametrize("chunks_done", [0, 1, 3, 7])
@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_cancelled_prompt_leaves_the_others_of_its_group_unchanged(
    bench_of: Any, no_eos: None, chunks_done: int, cancelled: int
) -> None:
    bench = bench_of(max_num_batched_tokens=15)
    requests = [(NAMES[0], LONG[:40]), (NAMES[1], LONG[:33]), (None, LONG[:28])]
    expected = [bench.alone(*request) for request in requests]
    ops = [bench.start(*request) for request in requests]
    bench.run(steps=chunks_done)
    bench.scheduler.stop(ops[cancelled])
    bench.run()
    for number, op in enumerate(ops):
        if number == cancelled:
            assert bench.end(op).finish_reason == "cancelled"
        else:
            assert bench.output(op) == expected[number]


def test_a_slot_that_changes_fails_its_prompts_between_two_chunks(
    bench_of: Any, no_eos: None
) -> None:
    bench = bench_of(max_num_batched_tokens=10)
    expected = bench.alone(None, LONG)
    stale, other = bench.start(NAMES[1], LONG), bench.start(None, LONG)
    bench.run(steps=2)
    bench.arena.reset(1, 1)
    bench.residents[1] = None
    bench.run()
    assert bench.end(stale).code == ErrorCode.NOT_RESIDENT
    assert bench.output(other) == expected


def test_an_adapter_with_few_rows_waits_a_bounded_number_of_steps(
    bench_of: Any, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows run endless requests of another adapter; all outputs stay the same."""
    monkeypatch.setattr(scheduler, "PREEMPT_AFTER_STEPS", 4)
    bench = bench_of(max_num_seqs=4)
    endless = Sampling(max_tokens=40)
    expected = bench.alone(NAMES[0], PROMPTS[1], endless)
    few = bench.alone(NAMES[1], PROMPTS[0], Sampling(max_tokens=4))
    greedy = [bench.start(NAMES[0], PROMPTS[1], endless) for _ in range(12)]
    bench.run(steps=6)
    other = bench.start(NAMES[1], PROMPTS[0], Sampling(max_tokens=4))
    bench.run(steps=4 + 1 + 4)
    assert isinstance(bench.end(other), GenerationEnded)
    assert bench.output(other) == few
    bench.run()
    assert [bench.output(op) for op in greedy] == [expected] * len(greedy)


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_client_waits_for_a_bounded_number_of_tokens_of_a_flood(
    is_paged: bool, bench_of: Any, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's long prompts have all rows and places; another one wants two tokens of the same
    model. What is computed until it has both is bounded by the budget of a step.
    """
    budget = 16
    bench = bench_of(
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        queue_requests_max=16,
        paged_attention=is_paged,
    )
    expected = bench.alone(None, PROMPTS[0], Sampling(max_tokens=2))
    passes: list[list[int]] = []
    bench.intercept(monkeypatch, lambda tokens, run: passes.append(tokens) or run())
    flood = [
        bench.start(None, (*range(50), number), Sampling(max_tokens=20), request_id=f"a:{number}")
        for number in range(16)
    ]
    bench.run(steps=3)
    for number in range(16, 32 - len(bench.scheduler._waiting)):
        bench.start(None, (*range(50), number), Sampling(max_tokens=2), request_id=f"a:{number}")
    with pytest.raises(EngineError, match="16 of them of this client"):
        bench.start(None, tuple(range(50)), request_id="a:more")
    passes.clear()
    bench.start(None, PROMPTS[0], Sampling(max_tokens=2), request_id="b:1")
    tokens: list[int] = []
    while len(tokens) < 2:
        bench.run(steps=1)
        streamed = (one for one in bench.reports if isinstance(one, TokensStreamed))
        tokens = [token for one in streamed if one.request_id == "b:1" for token in one.tokens]
    # The place of a new owner, its prompt next to the oldest one, and a token.
    steps = scheduler.NEW_OWNER_STEPS + 1 + (1 if is_paged else 4) + 1
    assert sum(map(sum, passes)) <= steps * (budget + 4)
    assert tokens == expected[0]
    bench.run()
    assert all(isinstance(bench.end(op), GenerationEnded) for op in flood)


def test_no_row_is_preempted_for_a_less_urgent_request(
    bench_of: Any, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PREEMPT_AFTER_STEPS", 4)
    bench = bench_of(max_num_seqs=2)
    urgent = [bench.start(NAMES[0], PROMPTS[1], priority=-1) for _ in range(2)]
    bench.run(steps=1)
    other = bench.start(NAMES[1], PROMPTS[0])
    bench.run(steps=12)
    assert bench.scheduler.running == urgent
    bench.run()
    assert isinstance(bench.end(other), GenerationEnded)


LACKS_OF_MEMORY = (
    torch.OutOfMemoryError("none"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
)


@pytest.mark.parametrize(("at", "error"), [*zip(range(1, 13, 2), 2 * LACKS_OF_MEMORY, strict=True)])
def test_a_lack_of_memory_ends_no_sequence_that_fits_alone(
    bench_of: Any, no_eos: None, monkeypatch: pytest.MonkeyPatch, error: Exception, at: int
) -> None:
    """Forward number `at` fails, and from then on every one with more than two rows."""
    bench = bench_of(max_num_batched_tokens=20)
    requests = MIXED[3:10]
    expected = [bench.alone(*request) for request in requests]
    calls = Counter[str]()

    def failing(tokens: list[int], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        calls["forward"] += 1
        if calls["forward"] == at or (calls["forward"] > at and len(tokens) > 2):
            raise error
        return run()

    bench.intercept(monkeypatch, failing)
    ops = [bench.start(*request) for request in requests]
    bench.run()
    failed = [op for op in ops if isinstance(bench.end(op), OperationFailed)]
    # Only one that was alone when memory lacked may fail.
    assert len(failed) <= 1
    for op, output in zip(ops, expected, strict=True):
        if op not in failed:
            assert bench.output(op) == output


def test_a_batch_that_can_not_be_joined_for_lack_of_memory_starts_again(
    bench_of: Any, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(paged_attention=False)
    expected = [bench.alone(*request) for request in MIXED[:6]]
    cache_class = type(bench.scheduler.batch._cache)
    join, calls = cache_class.join, Counter[str]()

    def failing(self: Any, other: Any) -> None:
        calls["join"] += 1
        if calls["join"] == 2:
            raise torch.OutOfMemoryError("none")
        join(self, other)

    monkeypatch.setattr(cache_class, "join", failing)
    assert bench.outputs(MIXED[:6], steps_between=2) == expected


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=20))
def test_grouped_prompts_have_little_padding(lengths: list[int]) -> None:
    group: list[int] = []
    for length in lengths:
        if may_join(group, length):
            group.append(length)
    width = max(group)
    assert width <= WIDTH_PADDED_MAX or width * len(group) <= 1.5 * sum(group)
