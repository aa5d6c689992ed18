"""Captured steps equal passes; graphs need equal launches; host syncs are found."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import structlog
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm, one_hot, scaled_dot_product_attention

from loradock.engine.adapters import read_adapter
from loradock.engine.config import LORA_SWITCHES, EngineConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models import binding
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.staging import stage
from loradock.engine.serving import startup
from loradock.engine.serving.blocks import BLOCK_TOKENS
from loradock.engine.serving.decoding import (
    CapturedDecode,
    CudaCapture,
    DecodeStep,
    ForbidHostSync,
    GraphKey,
    GraphRunner,
    HostSync,
    WeakShared,
)
from loradock.engine.serving.forward import PackedModel, decode_mapping
from loradock.engine.serving.startup import captured_or_none
from loradock.messages.prompts import Sampling
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, GenerationBench
from tests.support.engine.table_kernels import table_kernels, use_fixed_tables
from tests.support.engine.tape_capture import TapeCapture

pytest_plugins = ("tests.support.engine.engine_fixtures",)

CPU = torch.device("cpu")


class Steps(NamedTuple):
    """A captured bench's graphs, and what each of its passes consists of.

    `passes`: "decode" or the tokens of each chunk, in order.
    """

    capture: TapeCapture
    passes: list[Any]


@pytest.fixture
def steps() -> Steps:
    return Steps(TapeCapture(), [])


@pytest.fixture
def bench_of(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
) -> Callable[..., GenerationBench]:
    """Return a maker of benches; the last one that was made binds the model's layers."""

    def choose(
        punica: PunicaWrapper, packed: PackedModel, mapper: Any, config: Any, budget: Any
    ) -> CapturedDecode | None:
        use_fixed_tables(punica.grouper, monkeypatch)
        captured = captured_or_none(packed, GraphRunner(punica, steps.capture), mapper, budget)
        assert captured is not None
        run, forward = captured.run, packed.forward

        def record_run(chunks: Any) -> Tensor:
            steps.passes.append("decode")
            return run(chunks)

        def record_forward(chunks: Any) -> Tensor:
            steps.passes.append([len(chunk.tokens) for chunk in chunks])
            return forward(chunks)

        monkeypatch.setattr(captured, "run", record_run)
        monkeypatch.setattr(packed, "forward", record_forward)
        return captured

    def make(is_captured: bool, **fields: object) -> GenerationBench:
        monkeypatch.setattr(binding, "choose_kernels", lambda *_, **__: table_kernels())
        if is_captured:
            monkeypatch.setattr(startup, "choose_capture", choose)
        lora = {name: fields.pop(name) for name in tuple(fields) if name in LORA_SWITCHES}
        config = replace(engine_config, **{"max_num_seqs": 8} | fields)
        return GenerationBench(prepared_model, adapter_root, config, **lora)

    return make


MakeBench = Callable[..., GenerationBench]

MIXED_REQUESTS = [
    (*REQUESTS[at % len(REQUESTS)], Sampling(max_tokens=(3, 14, 1, 9, 5, 16, 2, 40)[at % 8]))
    for at in range(24)
]


def test_rows_that_join_and_leave_answer_as_alone_and_nothing_is_captured_meanwhile(
    bench_of: MakeBench, steps: Steps
) -> None:
    """Prompts of three tokens and more are divided, so that chunks run next to decode steps."""
    bench = bench_of(is_captured=False)
    expected = [bench.alone(*request) for request in MIXED_REQUESTS]
    for is_specialized in (False, True):
        bench = bench_of(True, specialize_active_lora=is_specialized, max_num_batched_tokens=8)
        captures, replays = steps.capture.captures, steps.capture.replays
        steps.passes.clear()
        assert bench.outputs(MIXED_REQUESTS, steps_between=2) == expected
        assert steps.capture.captures == captures
        assert steps.capture.replays - replays == steps.passes.count("decode") > 0
        chunks = [one for one in steps.passes if one != "decode"]
        assert len(chunks) > len(MIXED_REQUESTS) // 3
        assert steps.passes.count("decode") > len(chunks)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_batch_of_fewer_rows_than_the_start_compares_answers_as_alone(
    bench_of: MakeBench, steps: Steps, rows: int
) -> None:
    bench = bench_of(is_captured=False)
    expected = [bench.alone(*request) for request in MIXED_REQUESTS[:6]]
    bench = bench_of(True, max_num_seqs=rows)
    replays = steps.capture.replays
    assert bench.outputs(MIXED_REQUESTS[:6], steps_between=2) == expected
    assert steps.capture.replays > replays


def test_captured_rows_read_what_they_share_through_one_of_them(bench_of: MakeBench) -> None:
    """Rows that began with the blocks of others join and leave; some have other blocks too."""
    same = tuple(range(3, 3 + 2 * BLOCK_TOKENS))
    prompts = [(*same[: BLOCK_TOKENS * (1 + at % 2)], 60 + at, 5) for at in range(6)]
    requests = [
        (None, prompt, Sampling(max_tokens=7 + 3 * (at % 3))) for at, prompt in enumerate(prompts)
    ]
    bench = bench_of(is_captured=False)
    expected = [bench.alone(*request) for request in requests]
    bench = bench_of(is_captured=True)
    packed, lists = bench.scheduler.batch._packed, []
    find = packed._shared_numbers
    packed._shared_numbers = lambda *found: lists.append(find(*found)) or lists[-1]
    assert bench.outputs(requests, steps_between=3) == expected
    assert max(max(numbers) for numbers in lists) == 2 * BLOCK_TOKENS


def test_one_graph_per_number_of_rows_with_and_without_adapters(
    bench_of: MakeBench, steps: Steps
) -> None:
    bench = bench_of(True)
    runner = bench.scheduler.batch._captured.runner
    for has_adapters in (False, True):
        own = [key for key in runner.keys if (key.launches.tokens is not None) == has_adapters]
        assert sorted(key.shape for key in own) == [1, 2, 4, 8]
    assert len(runner.keys) == steps.capture.captures == 8


def test_an_adapter_that_replaces_another_in_its_slot_is_the_one_that_is_used(
    bench_of: MakeBench, adapter_root: Path, steps: Steps
) -> None:
    """The same steps are replayed for adapters of other ranks, modules and places."""
    names, sampling = ("everything", "output", "mlp", "patterns"), Sampling(max_tokens=9)
    bench = bench_of(is_captured=False)
    expected = [bench.alone(name, prompt, sampling) for name in names for prompt in PROMPTS]
    bench, ops, captures = bench_of(is_captured=True), [], set()
    target = bench.model.adapter_target(bench.lora_config)
    for generation, name in enumerate(names, 2):
        loaded = read_adapter(name, [adapter_root], target)
        fields = {"adapter_id": 10 * generation, "generation": generation}
        bench.blobs[10 * generation] = stage(loaded.model, bench.model.shapes, torch.float32)
        bench.arena.reset(0, generation - 1)
        bench.write(0, **fields)
        ops += [bench.start(NAMES[0], prompt, sampling, **fields) for prompt in PROMPTS]
        bench.run()
        captures.add(steps.capture.captures)
    assert [bench.output(op) for op in ops] == expected
    assert len(captures) == 1


def test_a_sequence_that_overflowed_does_not_affect_the_others(bench_of: MakeBench) -> None:
    expected = bench_of(is_captured=False).alone(None, PROMPTS[1])
    bench = bench_of(is_captured=True)
    others = [bench.start(None, PROMPTS[1]) for _ in range(2)]
    bad = bench.start(NAMES[0], PROMPTS[0])
    bench.run(steps=2)
    # The overflow must be in the cache.
    shape = next(shape for shape in bench.model.shapes if shape.name.endswith("v_proj"))
    wide = torch.full((1, shape.in_features), 3e38)
    bench.arena.write_slice(0, shape.index, wide, torch.full((shape.out_features, 1), 3e38))
    bench.run(steps=2)
    assert bench.end(bad)
    late = [bench.start(None, PROMPTS[1]) for _ in range(2)]
    bench.run()
    assert [bench.output(op) for op in (*others, *late)] == [expected] * 4


def test_suspended_and_recomputed_sequences_have_their_blocks_in_the_table(
    bench_of: MakeBench,
) -> None:
    """Few blocks, so that sequences lose theirs and are computed again from others."""
    requests = [(None, tuple(range(at, at + 20)), Sampling(max_tokens=40)) for at in range(6)]
    bench = bench_of(is_captured=False)
    expected = [bench.alone(*request) for request in requests]
    use = bench.scheduler.batch.kv_use
    bench = bench_of(True, kv_cache_bytes=16 * use.size_bytes_max // use.blocks)
    preempted = bench.record_preemptions()
    assert bench.outputs(requests) == expected
    assert preempted


def test_rows_that_are_unused_are_of_the_base_model() -> None:
    running = [SimpleNamespace(command=SimpleNamespace(adapter_id=id_)) for id_ in (3, 1, 3)]
    for rows, ids in ((0, [3, 1, 3]), (3, [3, 1, 3]), (4, [3, 1, 3, 0])):
        assert decode_mapping(running, rows) == LoRAMapping(ids, ids)


SLOTS = [1, 2, 3, 4, 5, 6]


def wrapper(specialize_active: bool = False) -> PunicaWrapper:
    return PunicaWrapper(
        torch.device("cpu"),
        16,
        choose_kernels("cpu", "reference"),
        specialize_active=specialize_active,
    )


def keys(batches: list[list[int]], specialize_active: bool) -> list[GraphKey]:
    """Return a key for each batch of adapter ids by row."""
    punica = wrapper(specialize_active)
    runner = GraphRunner(punica, lambda step: step)
    found = []
    for ids in batches:
        punica.update_metadata(LoRAMapping(ids, ids), SLOTS)
        runner.run(lambda: torch.zeros(1), len(ids))
        found.append(runner.keys[-1])
    return found


def test_one_graph_serves_all_adapters_and_any_number_of_them() -> None:
    found = keys([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4], [6, 6, 6, 6]], specialize_active=False)
    assert len(set(found)) == 1


def test_a_specialised_graph_serves_a_power_of_two_of_active_adapters() -> None:
    one, other, two, three, four = keys(
        [[1, 1, 0, 0], [0, 5, 5, 5], [1, 2, 1, 0], [1, 2, 3, 0], [1, 2, 3, 4]],
        specialize_active=True,
    )
    assert one == other
    assert three == four
    assert len({one, two, three}) == 3


@pytest.mark.parametrize("specialize_active", [True, False])
def test_a_batch_without_adapters_has_a_graph_of_its_own(specialize_active: bool) -> None:
    none, some = keys([[0, 0, 0, 0], [0, 0, 0, 1]], specialize_active)
    assert none != some


def test_a_graph_belongs_to_the_launches_over_tokens_and_over_sampled_rows() -> None:
    punica = wrapper()
    runner = GraphRunner(punica, lambda step: step)
    for tokens, rows in ((4, 2), (4, 3), (8, 2)):
        punica.update_metadata(LoRAMapping([1] * tokens, [1] * rows), SLOTS)
        runner.run(lambda: torch.zeros(1), "shape")
    assert len(runner.keys) == 3


def test_a_step_of_another_shape_is_another_graph() -> None:
    three, four = keys([[1, 0, 0], [1, 0, 0, 0]], specialize_active=False)
    assert three != four


def test_a_step_with_saved_layers_is_neither_captured_nor_replayed() -> None:
    """Their rows are chosen by index, so a replay would compute those of the captured batch."""
    punica = PunicaWrapper(
        torch.device("cpu"),
        16,
        choose_kernels("cpu", "reference"),
        has_saved_layers=lambda slot: slot == 2,
    )
    replays: list[DecodeStep] = []

    def capture(step: DecodeStep) -> DecodeStep:
        return lambda: replays.append(step) or step()

    runner = GraphRunner(punica, capture)
    for ids, is_replayed in (([1, 0], True), ([3, 0], False), ([1, 3], False), ([1, 1], True)):
        punica.update_metadata(LoRAMapping(ids, ids), SLOTS)
        replays.clear()
        assert runner.run(lambda: torch.ones(1), "shape") == 1.0
        assert bool(replays) == is_replayed
    assert len(runner.keys) == 1


def test_a_step_with_groups_for_a_layers_own_rows_is_not_replayed() -> None:
    """No later mapping overwrites the tables of those groups."""
    punica = wrapper()

    def capture(step: DecodeStep) -> DecodeStep:
        found = step()
        return lambda: found

    def step() -> Tensor:
        groups = punica.groups_of((2, 6))
        assert groups is not None
        return groups.token_slots

    runner = GraphRunner(punica, capture)
    for ids in ([1, 2], [3, 1], [2, 2]):
        punica.update_metadata(LoRAMapping([ids[0], *ids, ids[1]], ids), SLOTS)
        expected = [id_ - 1 for id_ in ids for _ in range(6)]
        assert runner.run(step, "shape").tolist() == expected
    assert "neither the tokens nor the sampled rows" in runner.failure


def test_groups_for_rows_of_a_prompt_do_not_end_replays() -> None:
    punica, replays = wrapper(), []
    runner = GraphRunner(punica, lambda step: lambda: replays.append(step) or step())
    for _ in range(3):
        punica.update_metadata(LoRAMapping([1, 1, 2, 2, 2, 2], [1, 2]), SLOTS)
        assert punica.groups_of((2, 6)) is not None
        punica.update_metadata(LoRAMapping([1, 2], [1, 2]), SLOTS)
        runner.run(lambda: torch.zeros(1), "shape")
    assert len(replays) == 3


def test_a_graph_is_not_replayed_for_reallocated_tables() -> None:
    punica = wrapper()
    runner = GraphRunner(punica, lambda step: step)
    for identity in (object(), object()):
        punica.grouper = Reallocated(identity)
        runner.run(lambda: torch.zeros(1), "shape")
    assert len(runner.keys) == 2


class Reallocated:
    """A grouper whose tables are elsewhere for each `buffer_identity`."""

    def __init__(self, buffer_identity: object) -> None:
        self.buffer_identity = buffer_identity


def test_the_least_recently_used_graph_is_evicted() -> None:
    made: list[object] = []

    def capture(step: DecodeStep) -> DecodeStep:
        made.append(step().item())
        return step

    runner = GraphRunner(wrapper(), capture, graphs_max=2)

    def run(number: int) -> Tensor:
        return runner.run(lambda: torch.tensor(number), number)

    for number in (1, 2, 1, 3, 1, 2):
        assert run(number) == number
    assert made == [1, 2, 3, 2]
    assert [key.shape for key in runner.keys] == [1, 2]


def test_a_step_that_can_not_be_captured_is_called_directly() -> None:
    tries: list[DecodeStep] = []

    def capture(step: DecodeStep) -> DecodeStep:
        tries.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = GraphRunner(wrapper(), capture)
    with structlog.testing.capture_logs() as logs:
        found = [runner.run(lambda n=n: torch.tensor(n), "shape").item() for n in range(3)]
    assert found == [0, 1, 2]
    assert len(tries) == len(logs) == 1
    assert "not permitted" in runner.failure
    assert "not permitted" in logs[0]["reason"]


def test_a_pool_is_shared_by_live_graphs_and_by_no_later_one() -> None:
    class Pool:
        """An object that graphs keep alive."""

    pool = WeakShared(Pool)
    graphs = [pool(), pool()]
    assert graphs[0] is graphs[1]
    first = ref(graphs.pop())
    assert pool() is first()
    graphs.clear()
    assert first() is None
    second = pool()
    assert pool() is second


def test_a_device_without_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match="a CUDA device is needed"):
        CudaCapture(torch.device("cpu"))


READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 2).any()),
    "comparison": lambda x: 1 if x[0] > 1 else 0,
    "int": lambda x: int(x[0]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "mask": lambda x: x[x > 1],
    "mask_written": lambda x: x.index_put_((x > 1,), torch.ones(2)),
    "range": lambda x: torch.arange(x[1].long()),
    "slice": lambda x: x[: x[2].long()],
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "one_hot": lambda x: one_hot(x.long()),
}

PASSES = {
    "index": lambda x: x[x.long()],
    "index_written": lambda x: x.index_put_((x.long(),), torch.ones(4)),
    "mask_filled": lambda x: x.index_put_((x > 1,), torch.tensor(0.0)),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "where_of_three": lambda x: torch.where(x > 1, x, 0),
    "sort": lambda x: x.sort(stable=True),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "product": lambda x: torch.nn.functional.linear(x[None], x[None]),
    "attention": lambda x: scaled_dot_product_attention(*3 * [x.view(1, 1, 1, 4)]),
}


def run(work: Callable[[Tensor], object], inference: bool) -> None:
    x = torch.arange(4.0)
    with ForbidHostSync(x.device), torch.inference_mode(inference):
        work(x)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", READS)
def test_a_read_raises(name: str, inference: bool) -> None:
    with pytest.raises(HostSync, match="aten"):
        run(READS[name], inference)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", PASSES)
def test_work_on_the_device_alone_passes(name: str, inference: bool) -> None:
    run(PASSES[name], inference)


# "meta" is the only other device that every machine has; its tensors have no values.
META = torch.device("meta")


@pytest.mark.parametrize("inference", [True, False])
def test_tensors_on_the_host_may_be_read(inference: bool) -> None:
    x = torch.arange(4.0)
    with ForbidHostSync(META), torch.inference_mode(inference):
        for read in READS.values():
            read(x.clone())
        (torch.zeros(3, device=META) + torch.tensor(1.0)).to(torch.float16)
        with pytest.raises(HostSync, match="reads"):
            bool(torch.zeros(1, device=META) > 0)


@pytest.mark.parametrize("inference", [True, False])
def test_a_copy_between_host_and_device_raises(inference: bool) -> None:
    x = torch.zeros(3)
    with ForbidHostSync(META), torch.inference_mode(inference):
        for copy in (lambda: x.to(META), lambda: torch.zeros(3, device=META).copy_(x)):
            with pytest.raises(HostSync, match="copies"):
                copy()


@pytest.mark.parametrize(
    ("dtype", "capability", "reads"),
    [
        (torch.bfloat16, (9, 0), False),
        (torch.bfloat16, (10, 0), False),
        (torch.bfloat16, (8, 0), True),
        (torch.bfloat16, (12, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), True),
    ],
)
def test_a_grouped_matmul_reads_where_pytorch_has_no_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], reads: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    with FakeTensorMode():
        x, matrices = (
            torch.empty(size, dtype=dtype, device="cuda") for size in ((8, 16), (2, 16, 32))
        )
        ends = torch.empty(2, dtype=torch.int32, device="cuda")
        with pytest.raises(HostSync) if reads else nullcontext(), ForbidHostSync(x.device):
            grouped_mm(x, matrices, offs=ends)
