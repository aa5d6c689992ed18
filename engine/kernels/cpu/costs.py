"""What each strategy costs on a CPU, in microseconds, and which one is the cheapest.

What it is: a table of constants, measured once and checked in, and three sums. What it is not: a
measurement while serving. One rule: only the order of the estimates matters, so what all strategies
share is left out.

Measured with torch 2.13 on one thread of an AVX-512 machine with bfloat16 instructions; a product
of `n` rows with `m` weights takes `call + m * weight + n * m * row`. `make bench ONLY=kernels`
prints how far the choice is from the best.
"""

from operator import mul
from typing import Final, NamedTuple

import torch

from engine.kernels.cpu.dense import Dense
from engine.kernels.cpu.gathered import Gathered
from engine.kernels.cpu.grouped import Grouped
from engine.kernels.cpu.layer_block import LayerBlock, SliceWeights, computation_dtypes


class Product(NamedTuple):
    """A matrix product in microseconds: a call, reading a weight, and one multiply-add."""

    call: float
    weight: float
    row: float


class Machine(NamedTuple):
    """What one dtype's steps cost: products two by two (shrink, expand), and moves by element."""

    grouped: tuple[Product, Product]
    dense: tuple[Product, Product]
    batched: tuple[Product, Product]
    stack: float
    side_by_side: float


MACHINES: Final = {
    torch.float32: Machine(
        grouped=(Product(2.2, 5e-5, 3.0e-5), Product(2.2, 1.0e-4, 2.6e-5)),
        dense=(Product(3.0, 5e-5, 2.5e-5), Product(3.0, 5e-5, 2.5e-5)),
        batched=(Product(5.0, 6e-5, 5.0e-5), Product(5.0, 1.5e-4, 2.8e-5)),
        stack=1.0e-4,
        side_by_side=1.5e-4,
    ),
    torch.bfloat16: Machine(
        grouped=(Product(16.0, 6e-5, 2.2e-5), Product(19.0, 6e-5, 1.4e-5)),
        dense=(Product(17.0, 5e-5, 1.1e-5), Product(17.0, 5e-5, 1.1e-5)),
        batched=(Product(17.0, 1.1e-4, 1.0e-5), Product(17.0, 2.0e-4, 1.0e-5)),
        stack=5.5e-5,
        side_by_side=1.3e-4,
    ),
}
"""By the dtype of the computation; float64 is taken to cost like float32."""

CONVERT_CALL: Final = 1.2
CONVERT_ELEMENT: Final = 8e-5
"""Rows or weights into the computation's dtype, or deltas out of it."""

Plan = Grouped | Dense | Gathered
Choice = tuple[type[Plan], torch.dtype]
"""A strategy, and the dtype to compute in."""


def cheapest(layer: LayerBlock) -> Choice:
    """The strategy for a layer and a block, and the dtype to compute in."""
    dtypes = computation_dtypes(layer.activations, layer.weights)
    choices: list[Choice] = [(Grouped, dtype) for dtype in dtypes]
    if len(layer.block.parts) > 1:
        choices.append((Dense, dtypes[0]))
        if Gathered.can_run(layer):
            choices.append((Gathered, dtypes[0]))
    if len(choices) == 1:
        return choices[0]
    return min(choices, key=lambda choice: estimate(choice[0], layer, choice[1]))


def estimate(strategy: type[Plan], layer: LayerBlock, dtype: torch.dtype) -> float:
    """The microseconds that one run takes, without what all strategies share."""
    machine = MACHINES.get(dtype, MACHINES[torch.float32])
    estimate_slice = _ESTIMATES[strategy]
    total = sum(estimate_slice(layer, one, machine, dtype) for one in layer.slices)
    if layer.activations != dtype:
        width = layer.in_features + sum(one.out_features for one in layer.slices)
        total += (1 + len(layer.slices)) * CONVERT_CALL
        total += CONVERT_ELEMENT * layer.block.size * width
    return total


def _grouped(layer: LayerBlock, one: SliceWeights, machine: Machine, dtype: torch.dtype) -> float:
    ranks = one.ranks
    calls = len(ranks) - ranks.count(0)
    rows = sum(map(mul, ranks, layer.block.sizes))
    total = 0.0
    for product, width in zip(machine.grouped, (one.in_features, one.out_features), strict=True):
        total += calls * product.call + width * (sum(ranks) * product.weight + rows * product.row)
        if layer.weights != dtype:
            total += calls * CONVERT_CALL + width * sum(ranks) * CONVERT_ELEMENT
    return total


def _dense(layer: LayerBlock, one: SliceWeights, machine: Machine, dtype: torch.dtype) -> float:
    ranks, rows = sum(one.ranks), layer.block.size
    moves = (machine.stack, machine.side_by_side)
    widths = (one.in_features, one.out_features)
    total = 1.0 + 3e-3 * rows
    for product, move, width in zip(machine.dense, moves, widths, strict=True):
        weights = ranks * width
        total += product.call + weights * (product.weight + move + rows * product.row)
        total += weights * CONVERT_ELEMENT if layer.weights != dtype else 0.0
    return total


def _gathered(layer: LayerBlock, one: SliceWeights, machine: Machine, dtype: torch.dtype) -> float:
    ranks, rows = sum(one.ranks), max(layer.block.sizes)
    total = 0.0
    for product, width in zip(machine.batched, (one.in_features, one.out_features), strict=True):
        weights = ranks * width
        total += product.call + weights * (product.weight + machine.stack + rows * product.row)
        total += weights * CONVERT_ELEMENT if layer.weights != dtype else 0.0
    return total


_ESTIMATES: Final = {Grouped: _grouped, Dense: _dense, Gathered: _gathered}
