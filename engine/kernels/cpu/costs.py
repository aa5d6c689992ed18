"""Cost model of the CPU strategies, in microseconds, and the choice of the cheapest.

The constants are a `CostTable`, measured on this machine at start (`calibration.py`) or those of
`DEFAULT_COSTS`; nothing is measured while serving. The choice is a function of table, layer and
block alone. Only the order of the estimates matters, so costs that all strategies
share are left out. `make bench ONLY=kernels` prints how far the choice is from the best.
"""

from bisect import bisect_left
from collections import Counter
from typing import Final, NamedTuple

import torch

from loradock.engine.kernels.cpu.dense import Dense
from loradock.engine.kernels.cpu.gathered import Gathered, TransposedGathered, stacks
from loradock.engine.kernels.cpu.grouped import Grouped
from loradock.engine.kernels.cpu.layer_block import LayerBlock, SliceWeights, computation_dtypes

ROWS: Final = (1, 2, 4, 16, 64)
"""The rows per part for which products are measured.

Libraries choose other code for a single row, for few rows and for many, so that more rows may take
less time: the costs between two points, and after the last one, are those of a line through them.
"""


class ProductCost(NamedTuple):
    """A matrix product in microseconds: the call, and for each of `ROWS` two linear parts.

    columns: per column of x or of the result, for any rank. weights: per weight.
    """

    call: float
    columns: tuple[float, ...]
    weights: tuple[float, ...]

    def time(self, rows: int, rank: int, width: int) -> float:
        """Return the time of a product of `rows` rows with [rank, width] or [width, rank]."""
        if not rank:
            return 0.0
        upper = min(max(bisect_left(ROWS, rows), 1), len(ROWS) - 1)
        lower = upper - 1
        part = (rows - ROWS[lower]) / (ROWS[upper] - ROWS[lower])
        below, above = (self.columns[at] + rank * self.weights[at] for at in (lower, upper))
        if part > 1.0:
            # Beyond the last point more rows never take less time.
            return self.call + width * (above + (part - 1.0) * max(above - below, 0.0))
        return self.call + width * (below + part * (above - below))


ShrinkExpandCost = tuple[ProductCost, ProductCost]
"""Of the first product and of the second."""


class DtypeCosts(NamedTuple):
    """Costs of one dtype: products, and copies per element.

    `looped`: of one part in one call. `batched`: of `BATCHED_PARTS` parts. `transposed`: the same
    as `TransposedGathered` computes them. The costs of batched products are for all parts together.
    `add`: of a delta to `y`, where it is not computed in place.
    """

    looped: ShrinkExpandCost
    batched: ShrinkExpandCost
    transposed: ShrinkExpandCost
    stack: float
    concatenate: float
    add: float


TRANSPOSED_MARGIN: Final = 1.15
"""By how much `TransposedGathered` must be cheaper than the others to be chosen.

With weights outside of the processor's nearer caches it took up to 1.4 times its estimate.
"""

COPIED_MARGIN: Final = 1.2
"""By how much strategies that copy or convert weights must be cheaper than others to be chosen.

Where weights and copies of all adapters do not fit in the processor's nearer caches, they took 1.1
to 1.8 times their estimates.
"""

NEAR_BYTES: Final = 3 << 20
"""Weights and copies of no more bytes were in the nearer caches where this was measured (2 MiB)."""

BATCHED_PARTS: Final = 8
"""The parts of the batched products that are measured."""


class CostTable(NamedTuple):
    """The constants of one machine, by the dtype of the computation.

    float64 is assumed to cost as much as float32. `convert_call` and `convert_element`: converting
    rows or weights to the computation's dtype, or deltas from it.
    """

    float32: DtypeCosts
    bfloat16: DtypeCosts
    convert_call: float
    convert_element: float

    def of(self, dtype: torch.dtype) -> DtypeCosts:
        """Return the costs of computing in `dtype`."""
        return self.bfloat16 if dtype == torch.bfloat16 else self.float32


_NEVER: Final = ProductCost(0.5, (0.0,) * len(ROWS), (0.0,) * len(ROWS))
"""Of products that are not computed in a dtype."""

DEFAULT_COSTS: Final = CostTable(
    float32=DtypeCosts(
        looped=(
            ProductCost(
                1.2, (0.0, 0.0, 0.0, 0.00049, 0.0037), (4.2e-05, 8.8e-05, 0.00016, 0.00039, 0.0013)
            ),
            ProductCost(
                1.2, (0.001, 0.0016, 0.0, 0.0, 0.0029), (4.1e-05, 8e-05, 0.00016, 0.0004, 0.0013)
            ),
        ),
        batched=(
            ProductCost(
                0.51, (0.0, 0.0, 6.9e-05, 0.0069, 0.0), (0.00047, 0.00076, 0.0014, 0.0032, 0.013)
            ),
            ProductCost(
                0.72, (0.0062, 0.011, 0.0, 0.0, 0.0), (0.00048, 0.00081, 0.0012, 0.003, 0.013)
            ),
        ),
        transposed=(
            ProductCost(
                0.5,
                (0.0008, 3.5e-05, 9.1e-06, 0.0011, 0.0),
                (0.00054, 0.0012, 0.0014, 0.0031, 0.013),
            ),
            ProductCost(
                1.4, (0.0059, 0.0, 0.001, 0.0, 0.0), (0.00049, 0.0027, 0.0012, 0.003, 0.013)
            ),
        ),
        stack=7.2e-05,
        concatenate=0.00015,
        add=0.00012,
    ),
    bfloat16=DtypeCosts(
        looped=(
            ProductCost(
                12.0,
                (0.0038, 0.00049, 0.00048, 0.0017, 0.0054),
                (4e-06, 5e-05, 5.4e-05, 8.8e-05, 0.00018),
            ),
            ProductCost(
                12.0,
                (0.00099, 0.00036, 0.0014, 0.0012, 0.0016),
                (2.5e-05, 2e-05, 1.8e-05, 7.7e-05, 0.00029),
            ),
        ),
        batched=(
            ProductCost(
                10.0,
                (0.0048, 0.0052, 0.0066, 0.015, 0.055),
                (0.00048, 0.00042, 0.00045, 0.00072, 0.0017),
            ),
            ProductCost(
                12.0,
                (0.0092, 0.01, 0.0095, 0.014, 0.025),
                (0.00027, 0.00024, 0.00033, 0.00068, 0.0021),
            ),
        ),
        transposed=(_NEVER, _NEVER),
        stack=3e-05,
        concatenate=0.0001,
        add=0.00021,
    ),
    convert_call=0.6,
    convert_element=6.3e-05,
)
"""Measured with torch 2.13 on one thread of an AVX-512 machine with bfloat16 instructions."""

Strategy = Grouped | Dense | Gathered
StrategyChoice = tuple[type[Strategy], torch.dtype]
"""A strategy, and the dtype to compute in."""


def cheapest_strategy(layer: LayerBlock, table: CostTable = DEFAULT_COSTS) -> StrategyChoice:
    """Return the cheapest strategy for a layer and a block, and the dtype to compute in."""
    dtypes = computation_dtypes(layer.activation_dtype, layer.weight_dtype)
    choices: list[StrategyChoice] = [(Grouped, dtype) for dtype in dtypes]
    if len(layer.block.parts) > 1:
        choices.append((Dense, dtypes[0]))
        batched = (one for one in (Gathered, TransposedGathered) if one.can_run(layer))
        choices.extend((one, dtypes[0]) for one in batched)
    if len(choices) == 1:
        return choices[0]
    return min(choices, key=lambda choice: estimate(choice[0], layer, choice[1], table))


def estimate(
    strategy: type[Strategy],
    layer: LayerBlock,
    dtype: torch.dtype,
    table: CostTable = DEFAULT_COSTS,
) -> float:
    """Estimate the microseconds of one run, without the costs that all strategies share."""
    slice_cost = _SLICE_COSTS[strategy]
    total = sum(slice_cost(layer, weights, table, dtype) for weights in layer.slices)
    copied_bytes = strategy.copied_bytes(layer, dtype)
    if copied_bytes and layer.weight_bytes + copied_bytes > NEAR_BYTES:
        total *= COPIED_MARGIN
    out_features = sum(weights.out_features for weights in layer.slices)
    if not strategy.adds_in_place(layer, dtype):
        total += table.of(dtype).add * layer.block.size * out_features
    if layer.activation_dtype != dtype:
        width = layer.in_features + out_features
        total += (1 + len(layer.slices)) * table.convert_call
        total += table.convert_element * layer.block.size * width
    return total


class LongLayer(NamedTuple):
    """A layer and the long groups of a batch, as far as costs depend on them.

    runs: the rows of each, and in the order of `out_features` the ranks of its weights or 0.
    """

    activation_dtype: torch.dtype
    weight_dtype: torch.dtype
    in_features: int
    out_features: tuple[int, ...]
    runs: tuple[tuple[int, tuple[int, ...]], ...]


def cheapest_dtype(layer: LongLayer, table: CostTable = DEFAULT_COSTS) -> torch.dtype:
    """Return the cheapest dtype in which to compute long groups."""
    dtypes = computation_dtypes(layer.activation_dtype, layer.weight_dtype)
    if len(dtypes) == 1:
        return dtypes[0]
    return min(dtypes, key=lambda dtype: _long_cost(layer, dtype, table))


def _long_cost(layer: LongLayer, dtype: torch.dtype, table: CostTable) -> float:
    (shrink, expand), width = table.of(dtype).looped, layer.in_features
    products = converted = 0.0
    for rows, ranks in layer.runs:
        converted += rows * width
        for rank, out_features in zip(ranks, layer.out_features, strict=True):
            products += shrink.time(rows, rank, width) + expand.time(rows, rank, out_features)
            # The weights, and the rows of the result before and after.
            converted += rank * (width + out_features) + 2 * rows * out_features
    if dtype == layer.weight_dtype:
        return products
    return COPIED_MARGIN * (products + converted * table.convert_element)


def _grouped_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    costs, ranks = table.of(dtype), slice_weights.ranks
    # Most parts have one of few shapes.
    parts = Counter(zip(layer.block.sizes, ranks, strict=True))
    total = 0.0
    for product, width in zip(costs.looped, slice_weights.features, strict=True):
        total += sum(
            count * product.time(rows, rank, width) for (rows, rank), count in parts.items()
        )
        if layer.weight_dtype != dtype:
            calls = len(ranks) - ranks.count(0)
            total += calls * table.convert_call + width * sum(ranks) * table.convert_element
    return total


def _dense_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    costs = table.of(dtype)
    ranks, rows = sum(slice_weights.ranks), layer.block.size
    moves = (costs.stack, costs.concatenate)
    total = 1.0 + 3e-3 * rows
    for product, move, width in zip(costs.looped, moves, slice_weights.features, strict=True):
        total += product.time(rows, ranks, width) + ranks * width * move
        total += ranks * width * table.convert_element if layer.weight_dtype != dtype else 0.0
    return total


def _gathered_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    return _batched_cost(layer, slice_weights, table, dtype, table.of(dtype).batched)


def _transposed_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    cost = _batched_cost(layer, slice_weights, table, dtype, table.of(dtype).transposed)
    return TRANSPOSED_MARGIN * cost


def _batched_cost(
    layer: LayerBlock,
    slice_weights: SliceWeights,
    table: CostTable,
    dtype: torch.dtype,
    products: ShrinkExpandCost,
) -> float:
    ranks, rows = slice_weights.ranks, max(layer.block.sizes)
    calls, stack = len(slice_weights.strided_runs), 0.0
    if stacks(slice_weights, layer.weight_dtype, dtype):
        calls, stack = 1, table.of(dtype).stack
    parts = len(ranks) / BATCHED_PARTS
    total = 0.0
    for product, width in zip(products, slice_weights.features, strict=True):
        one = product.time(rows, ranks[0], width) - product.call
        total += calls * product.call + parts * one + sum(ranks) * width * stack
        total += sum(ranks) * width * table.convert_element if layer.weight_dtype != dtype else 0.0
    return total


_SLICE_COSTS: Final = {
    Grouped: _grouped_cost,
    Dense: _dense_cost,
    Gathered: _gathered_cost,
    TransposedGathered: _transposed_cost,
}
