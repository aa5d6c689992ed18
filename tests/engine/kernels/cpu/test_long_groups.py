"""Long groups: right results in every dtype, and the dtype that costs the least."""

from random import Random

import pytest
import torch

from loradock.engine.kernels.cpu.blocks import BatchTiler, tile_by_length
from loradock.engine.kernels.cpu.costs import (
    DEFAULT_COSTS,
    CostTable,
    LongLayer,
    ProductCost,
    cheapest_dtype,
)
from loradock.engine.kernels.cpu.layer_block import computation_dtypes
from loradock.engine.kernels.cpu.linear import CpuLinear
from loradock.engine.kernels.cpu.long_groups import LongGroups
from loradock.engine.kernels.cpu.scratch import Scratch
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    Shape,
    error_of,
    expected_output,
    make_case,
)

SHAPE = Shape(130, (24, 100), 3, (3, 16))
BATCHES = {
    "one run": [0] * 300,
    "several": [1] * 140 + [-1] * 3 + [0] * 150 + [2] * 130,
    "mixed": [0, 2] * 140,
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_groups_are_right_in_every_offered_dtype(dtype: torch.dtype, rows: list[int]) -> None:
    case = make_case(SHAPE, rows, dtype, 1)
    runs = tile_by_length(case.groups, 128).runs
    assert sum(run.size for run in runs) == len(rows) - rows.count(-1)
    for computed in computation_dtypes(dtype, dtype):
        found = case.y.clone()
        LongGroups(runs, case.slices, dtype, computed, Scratch()).run(found, case.x, -0.5)
        assert error_of(found, expected_output(case, -0.5)) <= ERRORS_MAX[dtype]


def _table(float32: float, bfloat16: float, convert: float) -> CostTable:
    """Return costs of one dtype's weights each, and of converted elements."""

    def costs(weight: float) -> tuple[ProductCost, ProductCost]:
        cost = ProductCost(1.0, (0.0,) * 5, (weight,) * 5)
        return cost, cost

    return DEFAULT_COSTS._replace(
        float32=DEFAULT_COSTS.float32._replace(looped=costs(float32)),
        bfloat16=DEFAULT_COSTS.bfloat16._replace(looped=costs(bfloat16)),
        convert_element=convert,
    )


FAST = _table(1.0, 0.5, 0.0)
SLOW = _table(1.0, 9.0, 0.0)
COSTLY = _table(1.0, 9.0, 99.0)


@pytest.mark.parametrize(
    ("table", "dtype", "chosen"),
    [
        (FAST, torch.bfloat16, torch.bfloat16),
        (SLOW, torch.bfloat16, torch.float32),
        (COSTLY, torch.bfloat16, torch.bfloat16),
        (SLOW, torch.float32, torch.float32),
        (FAST, torch.float16, torch.float32),
    ],
)
def test_the_dtype_follows_from_a_table_of_constants(
    table: CostTable, dtype: torch.dtype, chosen: torch.dtype
) -> None:
    layer = LongLayer(dtype, dtype, 64, (64, 32), ((200, (8, 0)), (130, (4, 4))))
    assert cheapest_dtype(layer, table) == chosen


@pytest.mark.parametrize(("table", "used"), [(FAST, torch.bfloat16), (SLOW, torch.float32)])
def test_a_prefill_is_computed_in_that_dtype(
    table: CostTable, used: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    own = LongGroups._shrunk

    def shrunk(self: LongGroups, x_rows: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        computed.append(a.dtype)
        return own(self, x_rows, a)

    monkeypatch.setattr(LongGroups, "_shrunk", shrunk)
    rows = [0] * 200 + [1] * 200
    Random(3).shuffle(rows)
    case = make_case(SHAPE, rows, torch.bfloat16, 2)
    found = case.y.clone()
    CpuLinear(BatchTiler(False), Scratch(), table)(found, case.x, case.slices, case.groups, 1.0)
    assert set(computed) == {used}
    assert error_of(found, expected_output(case, 1.0)) <= ERRORS_MAX[torch.bfloat16]
