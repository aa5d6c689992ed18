"""Timing of the products of the CPU strategies: the constants of one dtype in a `CostTable`."""

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.cpu.costs import BATCHED_PARTS, ROWS, DtypeCosts, ProductCost

_SAMPLE_S: Final = 2e-3
_SAMPLES: Final = 5
_LONG_SAMPLES: Final = 2
"""The samples of a work that takes longer than `_SAMPLE_S`."""
_REPEATS_MAX: Final = 200
_RANKS: Final = (16, 64)
_WIDTHS: Final = (512, 2048)
"""The shapes that are timed; the narrow one is for the cost of a call."""
_CALL_MIN: Final = 0.5
_COPIED: Final = (64, 4096)
"""Rank and width of the copied weights: as in a model, they are not in the nearer caches."""
_ADDED: Final = 1 << 18

Work = Callable[[], object]


class _Shape(NamedTuple):
    rows: int
    rank: int
    width: int


MakeWork = Callable[[torch.dtype, _Shape], Work]
"""Return the product of a shape, with operands of its own."""


def microseconds(work: Work) -> float:
    """Return the shortest of some samples of the thread's time, which excludes other processes."""
    # The first call of a shape may compile code, which takes a hundred times as long as the work.
    work()
    started = time.thread_time()
    work()
    first = max(time.thread_time() - started, 1e-7)
    repeats = max(1, min(_REPEATS_MAX, int(_SAMPLE_S / _SAMPLES / first)))
    best = first
    for _ in range(_SAMPLES if first < _SAMPLE_S else _LONG_SAMPLES):
        started = time.thread_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.thread_time() - started) / repeats)
    return best * 1e6


def dtype_costs(dtype: torch.dtype) -> DtypeCosts:
    """Measure the products and copies of a dtype."""
    looped, batched, transposed = (
        (_product_cost(dtype, shrink), _product_cost(dtype, expand))
        for shrink, expand in _kinds(dtype)
    )
    shape = BATCHED_PARTS, *_COPIED
    stacked = torch.randn(shape).to(dtype)
    columns = stacked.mT.contiguous()
    elements = stacked.numel()
    flat_a, flat_b = (torch.empty(elements, dtype=dtype) for _ in range(2))
    a, b = flat_a.view(shape), flat_b.view(_COPIED[1], -1)
    sources = list(stacked), list(columns)
    # A delta was written just before.
    y, delta = flat_a[:_ADDED], flat_b[:_ADDED]
    return DtypeCosts(
        looped,
        batched,
        transposed,
        stack=microseconds(lambda: torch.stack(sources[0], out=a)) / elements,
        concatenate=microseconds(lambda: torch.cat(sources[1], 1, out=b)) / elements,
        add=microseconds(lambda: y.add_(delta)) / _ADDED,
    )


def _kinds(dtype: torch.dtype) -> Iterator[tuple[MakeWork, MakeWork]]:
    yield _looped_shrink, _looped_expand
    yield _batched_shrink, _batched_expand
    # Only float32 products are computed so.
    is_float32 = dtype == torch.float32
    yield (_transposed_shrink, _transposed_expand) if is_float32 else (_nothing, _nothing)


def _product_cost(dtype: torch.dtype, make: MakeWork) -> ProductCost:
    """Fit the constants of a product: its call, and for each of `ROWS` its two linear parts."""
    narrow, wide = _WIDTHS
    low, high = _RANKS

    def time_of(rows: int, rank: int, width: int) -> float:
        return microseconds(make(dtype, _Shape(rows, rank, width)))

    times = [(time_of(rows, low, wide), time_of(rows, high, wide)) for rows in ROWS]
    per_column = (times[1][0] - time_of(ROWS[1], low, narrow)) / (wide - narrow)
    call = max(times[1][0] - wide * per_column, _CALL_MIN)
    weights = [max(more - less, 0.0) / ((high - low) * wide) for less, more in times]
    columns = [
        max((less - call) / wide - low * weight, 0.0)
        for (less, _), weight in zip(times, weights, strict=True)
    ]
    return ProductCost(call, tuple(columns), tuple(weights))


def _nothing(dtype: torch.dtype, shape: _Shape) -> Work:
    del dtype, shape
    return lambda: None


def _looped_shrink(dtype: torch.dtype, shape: _Shape) -> Work:
    return _looped(*_batched(dtype, shape.rows, shape.width, shape.rank))


def _looped_expand(dtype: torch.dtype, shape: _Shape) -> Work:
    return _looped(*_batched(dtype, shape.rows, shape.rank, shape.width))


def _looped(x: Tensor, matrix: Tensor, out: Tensor) -> Work:
    """Return the product of the next part: they take turns, so they are no closer than batched."""
    operands = cycle([*zip(x, matrix.mT, out, strict=True)])

    def work() -> None:
        rows, weights, result = next(operands)
        torch.mm(rows, weights, out=result)

    return work


def _batched_shrink(dtype: torch.dtype, shape: _Shape) -> Work:
    x, a, out = _batched(dtype, shape.rows, shape.width, shape.rank)
    return lambda: torch.bmm(x, a.mT, out=out)


def _batched_expand(dtype: torch.dtype, shape: _Shape) -> Work:
    x, b, out = _batched(dtype, shape.rows, shape.rank, shape.width)
    return lambda: torch.bmm(x, b.mT, out=out)


def _transposed_shrink(dtype: torch.dtype, shape: _Shape) -> Work:
    x, a, out = _batched(dtype, shape.rows, shape.width, shape.rank)
    transposed = out.new_empty(out.mT.shape)
    return lambda: torch.bmm(a, x.mT, out=transposed)


def _transposed_expand(dtype: torch.dtype, shape: _Shape) -> Work:
    x, b, out = _batched(dtype, shape.rows, shape.rank, shape.width)
    transposed = x.mT.contiguous()
    return lambda: torch.bmm(transposed.mT, b.mT, out=out)


def _batched(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, transposed matrices, and memory for their products, of `BATCHED_PARTS` parts.

    The memory has been written before, as the engine's scratch memory has.
    """
    shapes = (rows, inputs), (outputs, inputs)
    x, matrix = (torch.randn(BATCHED_PARTS, *shape).to(dtype) for shape in shapes)
    return x, matrix, torch.ones(BATCHED_PARTS, rows, outputs, dtype=dtype)
