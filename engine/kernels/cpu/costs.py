"""Cost model of the CPU strategies, in microseconds, and the choice of the cheapest.

The constants are a `CostTable`, measured on this machine at start (`calibration.py`) or those of
`DEFAULT_COSTS`; nothing is measured while serving. The choice is a function of table, layer and
block alone. A product of `n` rows with `m` weights takes `call
+ m * weight + n * m * row`. Only the order of the estimates matters, so costs that all strategies
share are left out. `make bench ONLY=kernels` prints how far the choice is from the best.
"""

from operator import mul
from typing import Final, NamedTuple

import torch

from engine.kernels.cpu.dense import Dense
from engine.kernels.cpu.gathered import Gathered, stacks
from engine.kernels.cpu.grouped import Grouped
from engine.kernels.cpu.layer_block import LayerBlock, SliceWeights, computation_dtypes


class ProductCost(NamedTuple):
    """A matrix product in microseconds: the call, reading a weight, and one multiply-add."""

    call: float
    weight: float
    row: float


class DtypeCosts(NamedTuple):
    """Costs of one dtype: products as (shrink, expand), and copies per element."""

    grouped: tuple[ProductCost, ProductCost]
    dense: tuple[ProductCost, ProductCost]
    batched: tuple[ProductCost, ProductCost]
    stack: float
    concatenate: float


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


DEFAULT_COSTS: Final = CostTable(
    float32=DtypeCosts(
        grouped=(ProductCost(2.2, 5e-5, 3.0e-5), ProductCost(2.2, 1.0e-4, 2.6e-5)),
        dense=(ProductCost(3.0, 5e-5, 2.5e-5), ProductCost(3.0, 5e-5, 2.5e-5)),
        batched=(ProductCost(5.0, 6e-5, 5.0e-5), ProductCost(5.0, 1.5e-4, 2.8e-5)),
        stack=1.0e-4,
        concatenate=1.5e-4,
    ),
    bfloat16=DtypeCosts(
        grouped=(ProductCost(16.0, 6e-5, 2.2e-5), ProductCost(19.0, 6e-5, 1.4e-5)),
        dense=(ProductCost(17.0, 5e-5, 1.1e-5), ProductCost(17.0, 5e-5, 1.1e-5)),
        batched=(ProductCost(17.0, 1.1e-4, 1.0e-5), ProductCost(17.0, 2.0e-4, 1.0e-5)),
        stack=5.5e-5,
        concatenate=1.3e-4,
    ),
    convert_call=1.2,
    convert_element=8e-5,
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
        if Gathered.can_run(layer):
            choices.append((Gathered, dtypes[0]))
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
    if layer.activation_dtype != dtype:
        width = layer.in_features + sum(weights.out_features for weights in layer.slices)
        total += (1 + len(layer.slices)) * table.convert_call
        total += table.convert_element * layer.block.size * width
    return total


def _grouped_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    costs, ranks = table.of(dtype), slice_weights.ranks
    calls = len(ranks) - ranks.count(0)
    rows = sum(map(mul, ranks, layer.block.sizes))
    total = 0.0
    for product, width in zip(costs.grouped, slice_weights.features, strict=True):
        total += calls * product.call + width * (sum(ranks) * product.weight + rows * product.row)
        if layer.weight_dtype != dtype:
            total += calls * table.convert_call + width * sum(ranks) * table.convert_element
    return total


def _dense_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    costs = table.of(dtype)
    ranks, rows = sum(slice_weights.ranks), layer.block.size
    moves = (costs.stack, costs.concatenate)
    total = 1.0 + 3e-3 * rows
    for product, move, width in zip(costs.dense, moves, slice_weights.features, strict=True):
        weights = ranks * width
        total += product.call + weights * (product.weight + move + rows * product.row)
        total += weights * table.convert_element if layer.weight_dtype != dtype else 0.0
    return total


def _gathered_cost(
    layer: LayerBlock, slice_weights: SliceWeights, table: CostTable, dtype: torch.dtype
) -> float:
    costs = table.of(dtype)
    ranks, rows = sum(slice_weights.ranks), max(layer.block.sizes)
    calls, stack = len(slice_weights.strided_runs), 0.0
    if stacks(slice_weights, layer.weight_dtype, dtype):
        calls, stack = 1, costs.stack
    total = 0.0
    for product, width in zip(costs.batched, slice_weights.features, strict=True):
        weights = ranks * width
        total += calls * product.call + weights * (product.weight + stack + rows * product.row)
        total += weights * table.convert_element if layer.weight_dtype != dtype else 0.0
    return total


_SLICE_COSTS: Final = {Grouped: _grouped_cost, Dense: _dense_cost, Gathered: _gathered_cost}
