"""Two strategies for a decode step: dynamic, over a KV cache that grows, and static.

A static step uses the KV buffers up to the next power of two of rows and of columns, so that it can
be captured and replayed. Its inputs are one small table on the device, and it reads nothing back to
the host. Unused rows are dummies: one token of the base model each, which attends only to itself.
"""

from itertools import chain
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from loradock.engine.inference.decoding.cuda_graphs import StepRunner
from loradock.engine.layout import next_power_of_two
from loradock.engine.models.caches.kv_cache import STATIC_COLUMNS_MIN, BatchKVCache, static_mask
from loradock.engine.models.causal_model import CausalModel

_DUMMY: Final = (0, 1, 0)
"""A dummy row's token, length and position."""


class DecodeStrategy(Protocol):
    """A way to run decode steps; its `BatchKVCache` must be made with `keeps_capacity`."""

    keeps_capacity: bool

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows, dummies included, that the mapping of a step must have."""

    def run(self, tokens: Tensor, cache: BatchKVCache) -> Tensor:
        """Return the logits after each row's token, [rows, vocabulary], valid until the next call.

        tokens: [rows, 1] int64 on the host. `cache.lengths` already counts them.
        """


class DynamicDecode:
    """The model's own forward pass, over one more column with every step."""

    keeps_capacity = False

    def __init__(self, model: CausalModel) -> None:
        self._model = model

    def padded_rows(self, rows: int) -> int:
        """Return `rows`: there are no dummies."""
        return rows

    def run(self, tokens: Tensor, cache: BatchKVCache) -> Tensor:
        """Run one forward pass."""
        return self._model.forward(tokens, cache, ())


class _StepInputs(NamedTuple):
    """A step's inputs on the device, views of one tensor: [rows] each, and the column as [1]."""

    tokens: Tensor
    lengths: Tensor
    positions: Tensor
    column: Tensor


class StaticDecode:
    """Static steps, run by `runner`, over at least `columns_min` columns."""

    keeps_capacity = True

    def __init__(
        self, model: CausalModel, runner: StepRunner, columns_min: int = STATIC_COLUMNS_MIN
    ) -> None:
        self._model = model
        self._runner = runner
        self._columns_min = columns_min
        self._input_buffers: dict[int, Tensor] = {}
        self._buffers_key: tuple[object, ...] = ()

    def padded_rows(self, rows: int) -> int:
        """Return the next power of two."""
        return next_power_of_two(rows)

    def run(self, tokens: Tensor, cache: BatchKVCache) -> Tensor:
        """Write the step's inputs to the device, run it, and count the column that it wrote."""
        shape = cache.reserve(self._columns_min)
        if cache.buffers_key != self._buffers_key:
            # Captured steps read and write the old buffers.
            self._runner.invalidate()
            self._buffers_key = cache.buffers_key
        rows = list(zip(tokens[:, 0].tolist(), cache.lengths, cache.positions, strict=True))
        inputs = self._write(rows, shape.rows, shape.column)

        def step() -> Tensor:
            static = cache.static_cache(shape.rows, shape.columns, inputs.column)
            mask = static_mask(inputs.lengths, inputs.column, shape.columns)
            positions = (inputs.positions - 1).clamp(min=0)
            return self._model.run(inputs.tokens[:, None], mask, positions[:, None], static)

        logits = self._runner.run(step, (shape.rows, shape.columns))
        cache.advance()
        return logits[: len(cache)]

    def _write(
        self, rows: list[tuple[int, int, int]], padded_rows: int, column: int
    ) -> _StepInputs:
        """Write each row's (token, length, position), and the column, into the inputs' buffer."""
        if padded_rows not in self._input_buffers:
            size = 3 * padded_rows + 1
            # A tensor made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                buffer = torch.zeros(size, dtype=torch.int64, device=self._model.device)
            self._input_buffers[padded_rows] = buffer
        buffer = self._input_buffers[padded_rows]
        padded = rows + [_DUMMY] * (padded_rows - len(rows))
        buffer.copy_(torch.tensor([*chain.from_iterable(zip(*padded, strict=True)), column]))
        return _StepInputs(*torch.split(buffer, [padded_rows, padded_rows, padded_rows, 1]))
