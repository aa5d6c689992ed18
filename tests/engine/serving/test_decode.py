"""Static decode equals dynamic decode while sequences join and leave."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loradock.engine.config import EngineConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.layout import next_power_of_two
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import STATIC_COLUMNS_MIN, BatchKVCache, static_mask
from loradock.engine.models.kv_cache_layer import StaticKVLayer
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.serving import padded_batch, startup
from loradock.engine.serving.decoding import (
    DecodeStep,
    GraphRunner,
    StaticDecode,
    SyncCheckedRunner,
)
from loradock.messages.prompts import Sampling
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, GenerationBench
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


def test_captured_steps_equal_steps_that_run(
    make_bench: Callable[..., GenerationBench], no_eos: None
) -> None:
    lengths = [3, 14, 1, 9, 5, 16, 2, 80]
    requests = [(None, PROMPTS[at % 4], Sampling(max_tokens=lengths[at % 8])) for at in range(16)]
    bench = make_bench()
    expected = [bench.alone(*request) for request in requests]
    capture = TapeCapture()
    # The CPU's kernels read their groups on the host and can't be captured: the base model only.
    punica = PunicaWrapper(bench.model.device, 16, choose_kernels("cpu"))
    bench = make_bench(GraphRunner(punica, capture))
    assert bench.outputs(requests, steps_between=2) == expected
    assert capture.captures < capture.replays / 4


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


def test_buffers_are_powers_of_two(model: CausalModel) -> None:
    for lengths in ((1,), (1, 2, 3), (STATIC_COLUMNS_MIN - 1,), (STATIC_COLUMNS_MIN,)):
        cache = prefilled(model, lengths, True)
        shape = cache.reserve()
        assert shape.rows == next_power_of_two(len(lengths))
        assert shape.columns == (128 if max(lengths) == 64 else 64)
        assert shape.column == max(lengths)
        assert all(layer.capacity >= (shape.rows, shape.columns) for layer in cache.layers)


def test_a_static_mask_ends_at_the_steps_column() -> None:
    mask = static_mask(torch.tensor([1, 3, 5]), torch.tensor([4]), 6)
    assert mask.tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]


def test_a_static_layer_writes_one_column_and_returns_all() -> None:
    keys, values = torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 3)
    layer = StaticKVLayer(keys, values, torch.tensor([2]))
    layer.lazy_initialization(keys, values)
    found = layer.update(torch.ones(2, 1, 1, 3), -torch.ones(2, 1, 1, 3))
    assert found[0] is keys
    assert found[1] is values
    assert keys[:, :, 2].eq(1).all()
    assert values[:, :, 2].eq(-1).all()
    assert keys.sum() == -values.sum() == 6
    assert layer.get_seq_length() == 2
    assert layer.get_mask_sizes(1) == (4, 0)
    assert layer.get_max_length() == 4
