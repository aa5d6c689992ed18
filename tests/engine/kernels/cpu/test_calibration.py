"""Calibration: what is stored, and choices as functions of a table of constants."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from loradock.engine.kernels.cpu import calibration as calibrating
from loradock.engine.kernels.cpu import product_timing
from loradock.engine.kernels.cpu.base_linear import ROWS as BASE_ROWS
from loradock.engine.kernels.cpu.base_linear import WAYS, fastest_linear, fastest_ways
from loradock.engine.kernels.cpu.blocks import BatchTiler, tile_by_length
from loradock.engine.kernels.cpu.calibration import (
    Calibration,
    ProductSpeeds,
    calibration,
    decode_calibration,
    encode_calibration,
    faster_dtype,
    store,
    stored_at,
)
from loradock.engine.kernels.cpu.costs import (
    COPIED_MARGIN,
    DEFAULT_COSTS,
    NEAR_BYTES,
    ROWS,
    CostTable,
    ProductCost,
    cheapest_strategy,
    estimate,
)
from loradock.engine.kernels.cpu.dense import Dense
from loradock.engine.kernels.cpu.gathered import Gathered, TransposedGathered
from loradock.engine.kernels.cpu.grouped import Grouped
from loradock.engine.kernels.cpu.layer_block import layer_block
from loradock.engine.kernels.cpu.linear import CpuLinear
from loradock.engine.kernels.cpu.scratch import Scratch
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    Shape,
    error_of,
    expected_output,
    make_case,
    mixed_rows,
)
from tests.support.kernels.way_times import way_times

KNOWN = Calibration(DEFAULT_COSTS, ProductSpeeds(way_times(1.0), 2.0, 3.0))
NUMBERS = len(calibrating._numbers(KNOWN))
WRONG_NUMBERS = (-1.0, 1, 10**400, 1e12, float("nan"), float("inf"), True, "1.0", None, [1.0])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """Record each measurement, which takes no time."""
    found: list[Calibration] = []

    def measure() -> Calibration:
        found.append(KNOWN)
        return KNOWN

    monkeypatch.setattr(calibrating, "measure", measure)
    return found


def test_a_machine_is_measured_once(measured: list[Calibration], tmp_path: Path) -> None:
    assert [calibration(tmp_path / "new") for _ in range(3)] == [KNOWN] * 3
    assert len(measured) == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"[1, 2]", b"null", b"\xff", b"[" * 100_000),
        *(json.dumps([value] * NUMBERS).encode() for value in WRONG_NUMBERS),
        *(json.dumps([1.0] * count).encode() for count in (NUMBERS - 1, NUMBERS + 1)),
        json.dumps("1" * NUMBERS).encode(),
        json.dumps({str(at): 1.0 for at in range(NUMBERS)}).encode(),
    ],
)
def test_a_damaged_file_is_measured_again(
    content: bytes, measured: list[Calibration], tmp_path: Path
) -> None:
    calibration(tmp_path)
    [stored] = tmp_path.iterdir()
    whole = stored.read_bytes()
    stored.write_bytes(content)
    assert calibration(tmp_path) == KNOWN
    assert stored.read_bytes() == whole
    assert len(measured) == 2


@given(
    st.binary() | st.lists(st.floats() | st.integers()).map(lambda one: json.dumps(one).encode())
)
def test_any_other_bytes_are_no_calibration(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_calibration(data)


@given(st.lists(st.floats(0.0, 1e6), min_size=NUMBERS, max_size=NUMBERS))
def test_every_number_is_stored_exactly(numbers: list[float]) -> None:
    found = decode_calibration(json.dumps(numbers).encode())
    assert calibrating._numbers(found) == numbers
    assert decode_calibration(encode_calibration(found)) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_constants_lead_to_right_results(dtype: torch.dtype) -> None:
    """A disturbed measurement, or a changed file, costs time and nothing else."""
    random = Random(5)
    shape = Shape(48, (24, 40), 4, (1, 8, 16), 0.2)
    batches = [*(mixed_rows(random, tokens, 4) for tokens in (1, 9, 40)), [0] * 140 + [1] * 130]
    cases = [make_case(shape, rows, dtype, len(rows)) for rows in batches]
    expected = [expected_output(case) for case in cases]
    x, weight = torch.randn(9, 33), torch.randn(17, 33)
    for _ in range(8):
        numbers = [random.choice((0.0, 10 ** random.uniform(-6, 8))) for _ in range(NUMBERS)]
        found = decode_calibration(json.dumps(numbers).encode())
        product = fastest_linear(fastest_ways(found.products.float32))
        if product is not None:
            torch.testing.assert_close(product(x, weight, None), linear(x, weight))
        compute = CpuLinear(BatchTiler(False), Scratch(), found.costs)
        for case, right in zip(cases, expected, strict=True):
            y = case.y.clone()
            compute(y, case.x, case.slices, case.groups, 1.0)
            assert error_of(y, right) <= ERRORS_MAX[dtype]


def test_processes_that_store_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    path = stored_at(tmp_path)
    others = [
        Calibration(DEFAULT_COSTS, ProductSpeeds(way_times(1.0), float(at), 3.0))
        for at in range(1, 5)
    ]

    def store_often(one: Calibration) -> None:
        for _ in range(50):
            store(one, path)
            assert decode_calibration(path.read_bytes()) in others

    # Threads have one process id, as processes of several containers may have.
    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(store_often, others))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_can_not_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    path = stored_at(tmp_path)
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        store(KNOWN, path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "fields",
    [
        ("model name: one", "model name: other"),
        ("flags: fpu", "flags: fpu avx"),
        ("CPU part: 0xd0c", "CPU part: 0xd40"),
        ("Features: fp", "Features: fp sve"),
    ],
)
def test_another_processor_has_a_file_of_its_own(
    fields: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for line in (fields[0], fields[0], *fields):
        monkeypatch.setattr(Path, "read_text", lambda _path, line=line: f"processor: 0\n{line}\n")
        found.append(stored_at(tmp_path))
    assert found[0] == found[1] == found[2] != found[3]


def test_a_directory_that_cannot_be_written_is_no_error(
    measured: list[Calibration], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert calibration(tmp_path / "file") == KNOWN
    assert len(measured) == 1


def test_a_measurement_has_a_number_for_every_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calibrating, product_timing):
        monkeypatch.setattr(module, "microseconds", lambda work: float(work() is not None))
    before = torch.get_rng_state()
    found = calibrating.measure()
    assert torch.equal(torch.get_rng_state(), before), "a program's random numbers are its own"
    assert found.products[1:] == (2.0, 2.0)
    assert [len(times) for times in found.products.float32] == [len(WAYS)] * len(BASE_ROWS)
    assert len(calibrating._numbers(found)) == NUMBERS
    assert all(one >= 0 for one in calibrating._numbers(found))
    assert all(one.call > 0 for one in found.costs.float32.looped)


UNEVEN = ProductCost(3.0, (0.25, 0.5, 0.0, 2.0, 1.0), (0.125, 0.25, 0.0625, 0.5, 1.0))
"""Four rows take less time than two."""


def test_a_product_is_fitted_to_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_timing, "microseconds", lambda time: time)
    found = product_timing._product_cost(torch.float32, lambda _, shape: UNEVEN.time(*shape))
    assert found == UNEVEN


def test_the_time_of_a_product_is_a_line_between_the_measured_rows() -> None:
    times = [UNEVEN.time(rows, 8, 2) for rows in ROWS]
    for rows, columns, weights, time in zip(
        ROWS, UNEVEN.columns, UNEVEN.weights, times, strict=True
    ):
        assert time == UNEVEN.call + 2 * (columns + 8 * weights)
        assert UNEVEN.time(rows, 0, 2) == 0.0
    assert UNEVEN.time(3, 8, 2) == (times[1] + times[2]) / 2
    assert UNEVEN.time(10, 8, 2) == (times[2] + times[3]) / 2
    assert UNEVEN.time(2 * ROWS[-1] - ROWS[-2], 8, 2) == 2 * times[-1] - times[-2]
    falling = UNEVEN._replace(weights=(1.0, 1.0, 1.0, 1.0, 0.0))
    assert falling.time(100, 8, 2) == falling.time(ROWS[-1], 8, 2)


@pytest.mark.parametrize(
    ("saved", "speeds", "chosen"),
    [
        (torch.bfloat16, (1.0, 0.5, 9.0), torch.bfloat16),
        (torch.bfloat16, (1.0, 1.4, 9.0), torch.bfloat16),
        (torch.bfloat16, (1.0, 5.0, 9.0), torch.float32),
        (torch.float16, (1.0, 0.5, 9.0), torch.float32),
        (torch.float16, (1.0, 0.5, 1.0), torch.float16),
        (torch.float32, (1.0, 0.1, 0.1), torch.float32),
        (torch.float64, (1.0, 0.1, 0.1), torch.float64),
    ],
)
def test_a_model_is_never_rounded_and_widened_only_where_that_is_much_faster(
    saved: torch.dtype, speeds: tuple[float, float, float], chosen: torch.dtype
) -> None:
    own, bfloat16, float16 = speeds
    # Two numbers of rows count.
    measured = ProductSpeeds(way_times(own / 2), bfloat16, float16)
    assert faster_dtype(saved, measured) == chosen


def test_float32_counts_in_the_way_that_is_used() -> None:
    fast = dict.fromkeys(BASE_ROWS, 0.25)
    assert (
        faster_dtype(torch.bfloat16, ProductSpeeds(way_times(1.0, fast), 1.0, 9.0)) == torch.float32
    )
    assert faster_dtype(torch.bfloat16, ProductSpeeds(way_times(1.0), 1.0, 9.0)) == torch.bfloat16


def _cost(call: float, weight: float = 0.0, few: float = 0.0) -> tuple[ProductCost, ProductCost]:
    """Return a cost of calls, weights, and weights of products of two rows."""
    cost = ProductCost(
        call, (0.0,) * len(ROWS), (weight, weight + few, *[weight] * (len(ROWS) - 2))
    )
    return cost, cost


def _table(
    looped: tuple[ProductCost, ProductCost],
    batched: tuple[ProductCost, ProductCost],
    transposed: tuple[ProductCost, ProductCost],
    copy: float = 0.0,
    add: float = 0.0,
) -> CostTable:
    costs = type(DEFAULT_COSTS.float32)(looped, batched, transposed, copy, copy, add)
    return CostTable(costs, costs, 0.0, 0.0)


def test_only_contiguous_groups_do_without_an_addition() -> None:
    never = _cost(99.0)
    for looped, batched, slots, add, chosen in [
        (_cost(5.0), never, [0] * 4 + [1] * 4, 0.0, Dense),
        (_cost(5.0), never, [0] * 4 + [1] * 4, 1.0, Grouped),
        (_cost(5.0), never, [0, 1] * 4, 1.0, Dense),
        # Batched products need groups of equal size.
        (_cost(9.0), _cost(17.0), [0] * 4 + [1] * 4, 1.0, Gathered),
        (_cost(9.0), _cost(17.0), [0] * 4 + [1] * 3, 1.0, Grouped),
        (_cost(9.0), _cost(17.0), [0, 1] * 4, 1.0, Dense),
    ]:
        case = make_case(Shape(32, (32,), 4, (8,), 0.0), slots, torch.float32, 1)
        [block] = tile_by_length(case.groups).blocks
        layer = layer_block(case.slices, block, torch.float32)
        assert layer is not None
        table = _table(looped, batched, never, add=add)
        assert cheapest_strategy(layer, table) == (chosen, torch.float32)


@pytest.mark.parametrize(
    ("table", "slots", "chosen"),
    [
        (_table(_cost(0.1), _cost(9.0), _cost(9.0)), [0, 1, 2, 3], Grouped),
        (_table(_cost(5.0), _cost(99.0), _cost(99.0)), [0, 1, 2, 3], Dense),
        (_table(_cost(9.0, 9.0), _cost(0.1), _cost(9.0)), [0, 1, 2, 3], Gathered),
        (_table(_cost(9.0, 9.0), _cost(9.0), _cost(0.1)), [0, 1, 2, 3], TransposedGathered),
        # A product that is slow for two rows is chosen for one and for four.
        (_table(_cost(1.0), _cost(9.0), _cost(0.1, few=9.0), 9.0), [0, 1], TransposedGathered),
        (_table(_cost(1.0), _cost(9.0), _cost(0.1, few=9.0), 9.0), [0, 1] * 2, Grouped),
        (_table(_cost(1.0), _cost(9.0), _cost(0.1, few=9.0), 9.0), [0, 1] * 4, TransposedGathered),
        (_table(_cost(1.0), _cost(9.0), _cost(0.1), 9.0), [0, 1] * 8, TransposedGathered),
        (_table(_cost(1.0), _cost(9.0), _cost(0.1), 9.0), [0, 1] * 9, Grouped),
    ],
)
def test_the_choice_follows_from_a_table_of_constants(
    table: CostTable, slots: list[int], chosen: type
) -> None:
    case = make_case(Shape(32, (32,), 4, (8,), 0.0), slots, torch.float32, 1)
    [block] = tile_by_length(case.groups).blocks
    layer = layer_block(case.slices, block, torch.float32)
    assert layer is not None
    assert cheapest_strategy(layer, table) == (chosen, torch.float32)


def test_copies_that_leave_the_nearer_caches_need_a_margin() -> None:
    """Two adapters of rank 8: the copies are a quarter and four times of what is near."""
    table = _table(_cost(1.0), _cost(1.0), _cost(99.0))
    for width, factor in [(NEAR_BYTES // 1024, 1.0), (NEAR_BYTES // 64, COPIED_MARGIN)]:
        case = make_case(Shape(width, (width,), 2, (8,), 0.0), [0, 1], torch.float32, 1)
        [block] = tile_by_length(case.groups).blocks
        layer = layer_block(case.slices, block, torch.float32)
        assert layer is not None
        # Nothing is copied by the first one.
        assert estimate(Grouped, layer, torch.float32, table) == 4.0
        masked = 1.0 + 3e-3 * 2
        found = estimate(Dense, layer, torch.float32, table)
        assert found == pytest.approx(factor * (2.0 + masked))
