"""Static decode equals dynamic decode; graphs need equal launches; host syncs are found."""

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import structlog
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm, one_hot, scaled_dot_product_attention

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models import binding
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import STATIC_COLUMNS_MIN, BatchKVCache
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.staging import stage
from loradock.engine.serving import padded_batch, startup
from loradock.engine.serving.decoding import (
    CudaCapture,
    DecodeStep,
    DecodeStrategy,
    ForbidHostSync,
    GraphKey,
    GraphRunner,
    HostSync,
    StaticDecode,
    SyncCheckedRunner,
    WeakShared,
)
from loradock.messages.prompts import Sampling
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, GenerationBench
from tests.support.engine.table_kernels import table_kernels, use_fixed_tables
from tests.support.engine.tape_capture import TapeCapture

pytest_plugins = ("tests.support.engine.engine_fixtures",)

CPU = torch.device("cpu")

UNUSED = 1e30

"""The value of unused columns: finite, because attention weight 0 does not cancel a NaN."""


class Recorder:
    """Calls every step directly, and records the tensors that a graph of its shape would keep.

    `seen`: shape -> addresses of all tensors of the steps' closures since the last `invalidate`.
    `shapes`: all shapes so far.
    """

    failure = ""

    def __init__(self) -> None:
        self.seen: dict[Hashable, set[tuple[int, ...]]] = {}
        self.shapes: set[Hashable] = set()
        self.invalidated = 0

    def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
        self.shapes.add(shape)
        self.seen.setdefault(shape, set()).add(tuple(addresses(step)))
        return step()

    def invalidate(self) -> None:
        self.invalidated += 1
        self.seen.clear()


def closure_of(step: DecodeStep) -> dict[str, Any]:
    """Return the variables of a step: its inputs, the cache and the shape."""
    cells = zip(step.__code__.co_freevars, step.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def addresses(step: DecodeStep) -> list[int]:
    """Return the addresses of the tensors in a step's closure: its inputs and the KV buffers."""
    closure = closure_of(step)
    inputs, shape = closure["inputs"], closure["shape"]
    layers = closure["cache"].static_cache(shape.rows, shape.columns, inputs.column).layers
    tensors = [*inputs, *(one for layer in layers for one in (layer.keys, layer.values))]
    return [number for one in tensors for number in (one.data_ptr(), *one.stride())]


@pytest.fixture
def make_bench(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., GenerationBench]:
    """Return a maker of benches, with static decode by a given runner."""

    def make(runner: object = None, **changes: object) -> GenerationBench:
        if runner is not None:
            monkeypatch.setattr(
                startup, "choose_decode", lambda model, *_: StaticDecode(model, runner)
            )
        return GenerationBench(
            prepared_model, adapter_root, replace(engine_config, paged_attention=False, **changes)
        )

    return make


def test_sequences_that_join_leave_and_outgrow_the_buffers_change_nothing(
    make_bench: Callable[..., GenerationBench], no_eos: None
) -> None:
    lengths = [3, 14, 1, 9, 5, 16, 2, 90]
    requests = [
        (*REQUESTS[at % len(REQUESTS)], Sampling(max_tokens=lengths[at % 8])) for at in range(24)
    ]
    bench = make_bench()
    expected = [bench.alone(*request) for request in requests]
    recorder = Recorder()
    bench = make_bench(recorder)
    assert bench.outputs(requests, steps_between=2) == expected
    columns = {columns for _, columns in recorder.shapes}
    assert columns == {STATIC_COLUMNS_MIN, 2 * STATIC_COLUMNS_MIN}
    assert all(len(addresses) == 1 for addresses in recorder.seen.values())
    # Buffers grew a few times in rows and once in columns; nothing else reallocated them.
    assert recorder.invalidated <= 6


def test_an_idle_engine_keeps_its_buffers(
    make_bench: Callable[..., GenerationBench], no_eos: None
) -> None:
    recorder = Recorder()
    bench = make_bench(recorder)
    first = bench.alone("mlp", PROMPTS[1])
    assert recorder.invalidated == 1
    for name, prompt in REQUESTS[:6]:
        bench.start(name, prompt)
    bench.run()
    before = recorder.invalidated
    assert bench.alone("mlp", PROMPTS[1]) == first
    for name, prompt in REQUESTS[:6]:
        bench.start(name, prompt)
    bench.run()
    assert recorder.invalidated == before
    assert all(len(addresses) == 1 for addresses in recorder.seen.values())


def test_a_sequence_that_overflowed_does_not_affect_the_next_one_in_its_row(
    make_bench: Callable[..., GenerationBench], no_eos: None
) -> None:
    expected = make_bench().alone(None, PROMPTS[1])
    bench = make_bench(Recorder())
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


@pytest.fixture
def model(make_bench: Callable[..., GenerationBench]) -> CausalModel:
    """Return the model, without a mapping."""
    return make_bench().model


def prefilled(model: CausalModel, lengths: tuple[int, ...], keeps_capacity: bool) -> BatchKVCache:
    torch.manual_seed(5)
    cache = BatchKVCache(lengths, keeps_capacity=keeps_capacity)
    model.forward(torch.randint(0, 250, (len(lengths), max(lengths))), cache)
    return cache


def overwrite_unused(cache: BatchKVCache, value: float) -> None:
    """Overwrite unused rows with NaN, and the columns that are not a row's own with `value`."""
    for layer in cache.layers:
        whole = layer.static_layer(*layer.capacity, torch.zeros(1, dtype=torch.int64))
        for buffer in (whole.keys, whole.values):
            buffer[len(cache) :] = torch.nan
            for row, length in enumerate(cache.lengths):
                buffer[row, :, : layer.last - length] = value
                buffer[row, :, layer.last :] = value


def grown(cache: BatchKVCache) -> BatchKVCache:
    """Return `cache`, with one more token counted in every row."""
    cache.grow(1)
    return cache


@pytest.mark.parametrize("lengths", [(3, 1, 7), (5,), (2, 9, 4, 4, 1)])
def test_only_a_rows_own_columns_are_read(model: CausalModel, lengths: tuple[int, ...]) -> None:
    dynamic, static = (prefilled(model, lengths, keeps) for keeps in (False, True))
    decode = StaticDecode(model, SyncCheckedRunner(CPU))
    tokens = torch.arange(len(lengths))[:, None]
    for _ in range(3):
        static.reserve()
        overwrite_unused(static, UNUSED)
        expected = model.forward(tokens, grown(dynamic))
        found = decode.run(tokens, grown(static))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert static.width == dynamic.width


def test_rows_that_are_unused_attend_only_to_themselves(model: CausalModel) -> None:
    """They are reset where a sequence has left, and the others have their own values."""
    seen = []

    class Noting(SyncCheckedRunner):
        def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
            inputs = closure_of(step)["inputs"]
            seen.append(torch.stack(inputs[:3], 1).tolist())
            return super().run(step, shape)

    lengths, decode = (3, 1, 7, 2, 2, 6, 1, 5), StaticDecode(model, Noting(CPU))
    cache = prefilled(model, lengths, keeps_capacity=True)
    decode.run(torch.arange(8)[:, None], grown(cache))
    # A row's position is counted from 1.
    assert seen.pop() == [[row, length + 1, length + 1] for row, length in enumerate(lengths)]
    cache.keep([0, 2, 3, 5, 7])
    found = decode.run(torch.arange(5)[:, None], grown(cache))
    assert len(found) == 5
    own = [[row, length + 2, length + 2] for row, length in enumerate((3, 7, 2, 6, 5))]
    assert seen == [own + [[0, 1, 0]] * 3]


def test_rows_that_are_unused_are_of_the_base_model() -> None:
    running = [SimpleNamespace(command=SimpleNamespace(adapter_id=id_)) for id_ in (3, 1, 3)]
    for rows, ids in ((3, [3, 1, 3]), (4, [3, 1, 3, 0])):
        assert padded_batch._decode_mapping(running, rows) == LoRAMapping(ids, ids)


def test_a_crop_on_the_left_does_not_reallocate_the_buffers(model: CausalModel) -> None:
    dynamic, static = (prefilled(model, (2, 60, 3), keeps) for keeps in (False, True))
    decode = StaticDecode(model, SyncCheckedRunner(CPU))
    decode.run(torch.zeros(3, 1, dtype=torch.int64), grown(static))
    model.forward(torch.zeros(3, 1, dtype=torch.int64), grown(dynamic))
    before = static.buffers_key
    for cache in (dynamic, static):
        cache.keep([0, 2])
    assert (static.layers[0].first, static.layers[0].last) == (57, 61)
    for token in range(8):
        tokens = torch.tensor([[token], [token + 1]])
        expected = model.forward(tokens, grown(dynamic))
        found = decode.run(tokens, grown(static))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    # Column 64 would have needed twice the columns, of which four are used.
    assert static.layers[0].first == 0
    assert static.buffers_key == before


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
    runner.invalidate()
    run(1)
    assert made[-1] == 1


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


LENGTHS = [3, 14, 1, 9, 5, 16, 2, 70]

MIXED_REQUESTS = [
    (*REQUESTS[at % len(REQUESTS)], Sampling(max_tokens=LENGTHS[at % 8])) for at in range(24)
]

MakeBench = Callable[..., GenerationBench]


@pytest.fixture
def capture() -> TapeCapture:
    return TapeCapture()


@pytest.fixture
def captured_bench_of(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    capture: TapeCapture,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
) -> MakeBench:
    """Return a maker of benches; the last one that was made binds the model's layers."""

    def choose(model: CausalModel, punica: PunicaWrapper, *_: object) -> DecodeStrategy:
        use_fixed_tables(punica.grouper, monkeypatch)
        return StaticDecode(model, GraphRunner(punica, capture))

    def make(is_captured: bool, **lora_fields: object) -> GenerationBench:
        if is_captured:
            monkeypatch.setattr(startup, "choose_decode", choose)
            monkeypatch.setattr(binding, "choose_kernels", lambda *_, **__: table_kernels())
        config = replace(engine_config, paged_attention=False)
        return GenerationBench(prepared_model, adapter_root, config, **lora_fields)

    return make


@pytest.mark.parametrize("specialize_active", [False, True])
def test_rows_with_adapters_that_join_and_leave_answer_as_alone(
    captured_bench_of: MakeBench, capture: TapeCapture, specialize_active: bool
) -> None:
    bench = captured_bench_of(is_captured=False)
    expected = [bench.alone(*request) for request in MIXED_REQUESTS]
    bench = captured_bench_of(is_captured=True, specialize_active_lora=specialize_active)
    for _ in range(2):
        assert bench.outputs(MIXED_REQUESTS, steps_between=2) == expected
    assert capture.captures < capture.replays / 4


def test_an_adapter_that_replaces_another_in_its_slot_is_the_one_that_is_used(
    captured_bench_of: MakeBench, adapter_root: Path, capture: TapeCapture
) -> None:
    """The same steps are replayed for adapters of other ranks, modules and places."""
    names, sampling = ("everything", "output", "mlp", "patterns"), Sampling(max_tokens=9)
    bench = captured_bench_of(is_captured=False)
    expected = [bench.alone(name, prompt, sampling) for name in names for prompt in PROMPTS]
    bench, ops, captures = captured_bench_of(is_captured=True), [], set()
    target = bench.model.adapter_target(bench.lora_config)
    for generation, name in enumerate(names, 2):
        loaded = read_adapter(name, [adapter_root], target)
        bench.blob = stage(loaded.model, bench.model.shapes, torch.float32)
        fields = {"adapter_id": 10 * generation, "generation": generation}
        bench.arena.reset(0, generation - 1)
        bench.write(0, **fields)
        ops += [bench.start(NAMES[0], prompt, sampling, **fields) for prompt in PROMPTS]
        bench.run()
        captures.add(capture.captures)
    assert [bench.output(op) for op in ops] == expected
    assert len(captures) == 1
