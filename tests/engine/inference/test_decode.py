"""Steps over fixed places answer as those over a growing cache, whatever joins and leaves."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.inference import generator
from engine.inference.cuda_graphs import CapturedSteps, Step, WatchedSteps
from engine.inference.decode import FixedSteps
from engine.kernels import choose_kernels
from engine.layout import power_of_two
from engine.models.causal_model import PreparedModel
from engine.models.kv_cache import FIXED_COLUMNS_MIN, RowCache, fixed_mask
from engine.models.kv_cache_layer import FixedLayer
from engine.punica import PunicaWrapper
from messages.requests import Sampling
from tests.support.engine.generator_bench import NAMES, PROMPTS, ROWS, GeneratorBench
from tests.support.engine.replayed_steps import TapeCapture

pytest_plugins = ("tests.support.engine.engine_fixtures",)

CPU = torch.device("cpu")

SPOILT = 1e30
"""What lies where nobody may read: finite, because weight 0 does not make up for a NaN."""


class Recorder:
    """Runs every step by itself, and notes the tensors that a graph of its shape would hold on to.

    `seen`: shape -> the places of all tensors that the step took from outside, since `forget`.
    `shapes`: all that there ever were.
    """

    failure = ""

    def __init__(self) -> None:
        self.seen: dict[Hashable, set[tuple[int, ...]]] = {}
        self.shapes: set[Hashable] = set()
        self.forgotten = 0

    def run(self, step: Step, shape: Hashable) -> Tensor:
        self.shapes.add(shape)
        self.seen.setdefault(shape, set()).add(tuple(addresses(step)))
        return step()

    def forget(self) -> None:
        self.forgotten += 1
        self.seen.clear()


def addresses(step: Step) -> list[int]:
    """Where the tensors lie that a step's closure has: its table's, and the buffers'."""
    held = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))
    table, rows = held["table"].cell_contents, held["rows"].cell_contents
    places = held["places"].cell_contents
    layers = rows.fixed(places.rows, places.columns, table.column).layers
    tensors = [*table, *(one for layer in layers for one in (layer.keys, layer.values))]
    return [number for one in tensors for number in (one.data_ptr(), *one.stride())]


@pytest.fixture
def make_bench(
    prepared_model: PreparedModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., GeneratorBench]:
    """Benches whose decode steps are over fixed places, by a given runner."""

    def make(runner: object = None, **changes: object) -> GeneratorBench:
        if runner is not None:
            monkeypatch.setattr(
                generator, "choose_steps", lambda model, *_: FixedSteps(model, runner)
            )
        return GeneratorBench(prepared_model, adapter_root, replace(engine_config, **changes))

    return make


def test_rows_that_join_and_leave_and_outgrow_their_places_change_nothing(
    make_bench: Callable[..., GeneratorBench], no_eos: None
) -> None:
    lengths = [3, 14, 1, 9, 5, 16, 2, 90]
    rows = [(*ROWS[at % len(ROWS)], Sampling(max_tokens=lengths[at % 8])) for at in range(24)]
    bench = make_bench()
    expected = [bench.alone(*row) for row in rows]
    recorder = Recorder()
    bench = make_bench(recorder)
    ops = []
    for row in rows:
        ops.append(bench.start(*row))
        bench.run(steps=2)
    bench.run()
    assert [bench.output(op) for op in ops] == expected
    columns = {columns for _, columns in recorder.shapes}
    assert columns == {FIXED_COLUMNS_MIN, 2 * FIXED_COLUMNS_MIN}
    assert all(len(places) == 1 for places in recorder.seen.values())
    # Room in rows grew a few times, in columns once, and nothing else moved the buffers.
    assert recorder.forgotten <= 6


def test_captured_steps_answer_as_those_that_run(
    make_bench: Callable[..., GeneratorBench], no_eos: None
) -> None:
    lengths = [3, 14, 1, 9, 5, 16, 2, 80]
    rows = [(None, PROMPTS[at % 4], Sampling(max_tokens=lengths[at % 8])) for at in range(16)]
    bench = make_bench()
    expected = [bench.alone(*row) for row in rows]
    capture = TapeCapture()
    # The tape knows the CPU's kernels, which read their groups on the host: the base model alone.
    punica = PunicaWrapper(bench.model.device, 16, choose_kernels("cpu"))
    bench = make_bench(CapturedSteps(punica, capture))
    ops = []
    for row in rows:
        ops.append(bench.start(*row))
        bench.run(steps=2)
    bench.run()
    assert [bench.output(op) for op in ops] == expected
    assert capture.captures < capture.replays / 4


def test_an_idle_engine_keeps_the_places_for_what_comes_next(
    make_bench: Callable[..., GeneratorBench], no_eos: None
) -> None:
    recorder = Recorder()
    bench = make_bench(recorder)
    first = bench.alone("mlp", PROMPTS[1])
    assert recorder.forgotten == 1
    for name, prompt in ROWS[:6]:
        bench.start(name, prompt)
    bench.run()
    moved = recorder.forgotten
    assert bench.alone("mlp", PROMPTS[1]) == first
    for name, prompt in ROWS[:6]:
        bench.start(name, prompt)
    bench.run()
    assert recorder.forgotten == moved
    assert all(len(places) == 1 for places in recorder.seen.values())


def test_a_row_that_overflowed_leaves_nothing_to_the_row_in_its_place(
    make_bench: Callable[..., GeneratorBench], no_eos: None
) -> None:
    expected = make_bench().alone(None, PROMPTS[1])
    bench = make_bench(Recorder())
    others = [bench.start(None, PROMPTS[1]) for _ in range(2)]
    bad = bench.start(NAMES[0], PROMPTS[0])
    bench.run(steps=2)
    # What overflows has to be kept in the cache.
    shape = next(shape for shape in bench.model.shapes if shape.name.endswith("v_proj"))
    wide = torch.full((1, shape.in_features), 3e38)
    bench.arena.write_slice(0, shape.index, wide, torch.full((shape.out_features, 1), 3e38))
    bench.run(steps=2)
    assert bench.end(bad)
    late = [bench.start(None, PROMPTS[1]) for _ in range(2)]
    bench.run()
    assert [bench.output(op) for op in (*others, *late)] == [expected] * 4


@pytest.fixture
def model(make_bench: Callable[..., GeneratorBench]) -> PreparedModel:
    """The model, without a mapping."""
    return make_bench().model


def prefilled(model: PreparedModel, lengths: tuple[int, ...], keeps_room: bool) -> RowCache:
    torch.manual_seed(5)
    rows = RowCache(lengths, keeps_room=keeps_room)
    model.forward(torch.randint(0, 250, (len(lengths), max(lengths))), rows)
    return rows


def spoil(rows: RowCache, value: float) -> None:
    """Fill every place that is not a running row's: rows behind the last, columns not its own."""
    for layer in rows.layers:
        room = layer.room
        whole = layer.fixed(*room, torch.zeros(1, dtype=torch.int64))
        for buffer in (whole.keys, whole.values):
            buffer[len(rows) :] = torch.nan
            for row, length in enumerate(rows.lengths):
                buffer[row, :, : layer.last - length] = value
                buffer[row, :, layer.last :] = value


@pytest.mark.parametrize("lengths", [(3, 1, 7), (5,), (2, 9, 4, 4, 1)])
def test_nothing_is_read_that_is_not_a_rows_own(
    model: PreparedModel, lengths: tuple[int, ...]
) -> None:
    growing, fixed = (prefilled(model, lengths, keeps) for keeps in (False, True))
    steps = FixedSteps(model, WatchedSteps(CPU))
    tokens = torch.arange(len(lengths))[:, None]
    for _ in range(3):
        fixed.provide()
        spoil(fixed, SPOILT)
        for rows in (growing, fixed):
            rows.grow(1)
        expected = model.forward(tokens, growing)
        assert torch.allclose(steps.run(tokens, fixed), expected, rtol=1e-4, atol=1e-4)
        assert fixed.width == growing.width


def test_a_crop_on_the_left_slides_what_is_used_and_not_the_places(
    model: PreparedModel,
) -> None:
    growing, fixed = (prefilled(model, (2, 60, 3), keeps) for keeps in (False, True))
    steps = FixedSteps(model, WatchedSteps(CPU))
    steps.run(torch.zeros(3, 1, dtype=torch.int64), grown(fixed))
    model.forward(torch.zeros(3, 1, dtype=torch.int64), grown(growing))
    place = fixed.place
    for rows in (growing, fixed):
        rows.keep([0, 2])
    assert (fixed.layers[0].first, fixed.layers[0].last) == (57, 61)
    for token in range(8):
        tokens = torch.tensor([[token], [token + 1]])
        expected = model.forward(tokens, grown(growing))
        found = steps.run(tokens, grown(fixed))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    # Column 64 would have needed twice the columns, and four are used.
    assert fixed.layers[0].first == 0
    assert fixed.place == place


def grown(rows: RowCache) -> RowCache:
    rows.grow(1)
    return rows


def test_places_are_powers_of_two(model: PreparedModel) -> None:
    for lengths in ((1,), (1, 2, 3), (FIXED_COLUMNS_MIN - 1,), (FIXED_COLUMNS_MIN,)):
        rows = prefilled(model, lengths, True)
        places = rows.provide()
        assert places.rows == power_of_two(len(lengths))
        assert places.columns == (128 if max(lengths) == 64 else 64)
        assert places.column == max(lengths)
        assert all(layer.room >= (places.rows, places.columns) for layer in rows.layers)


def test_a_fixed_mask_is_the_columns_up_to_the_steps_own() -> None:
    mask = fixed_mask(torch.tensor([1, 3, 5]), torch.tensor([4]), 6)
    assert mask.tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]


def test_a_fixed_layer_writes_one_column_and_gives_them_all() -> None:
    keys, values = torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 3)
    layer = FixedLayer(keys, values, torch.tensor([2]))
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
