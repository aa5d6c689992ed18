"""The two ways to bring all running rows one token on: over a cache that grows, or fixed places.

What it is: a step's inputs, and what it does over fixed places, which can be captured and replayed.
What it is not: a prefill, or a decision which adapters run. One rule: over fixed places the host
says everything in one small table on the device, and reads nothing back within the step.

Fixed places are the cache's buffers, up to the next power of two of rows and of columns. Rows that
nobody has are dummies: one token of the base model each, which sees itself alone.
"""

from itertools import chain
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.inference.cuda_graphs import StepRunner
from engine.layout import power_of_two
from engine.models.causal_model import PreparedModel
from engine.models.kv_cache import FIXED_COLUMNS_MIN, RowCache, fixed_mask

_DUMMY: Final = (0, 1, 0)
"""A dummy row's token, length and position."""


class DecodeSteps(Protocol):
    """A way to run decode steps. `keeps_room`: what its `RowCache` is to be made with."""

    keeps_room: bool

    def places(self, rows: int) -> int:
        """How many rows a step of so many rows has; the mapping has to have as many."""

    def run(self, tokens: Tensor, rows: RowCache) -> Tensor:
        """The logits after each row's next token, [rows, vocabulary], good until the next call.

        tokens: [rows, 1] int64 on the host. `rows.lengths` already counts them.
        """


class GrowingSteps:
    """The model's own forward, each time over one column more."""

    keeps_room = False

    def __init__(self, model: PreparedModel) -> None:
        self._model = model

    def places(self, rows: int) -> int:
        """Just as many."""
        return rows

    def run(self, tokens: Tensor, rows: RowCache) -> Tensor:
        """One forward."""
        return self._model.forward(tokens, rows, ())


class _Table(NamedTuple):
    """A step's inputs on the device, views of one tensor: [rows] each, and the column as [1]."""

    tokens: Tensor
    lengths: Tensor
    positions: Tensor
    column: Tensor


class FixedSteps:
    """Steps over fixed places, by `runner`."""

    keeps_room = True

    def __init__(
        self, model: PreparedModel, runner: StepRunner, columns_min: int = FIXED_COLUMNS_MIN
    ) -> None:
        self._model = model
        self._runner = runner
        self._columns_min = columns_min
        self._tables: dict[int, Tensor] = {}
        self._place: tuple[object, ...] = ()

    def places(self, rows: int) -> int:
        """The next power of two."""
        return power_of_two(rows)

    def run(self, tokens: Tensor, rows: RowCache) -> Tensor:
        """Write the step's inputs to their places, run it, and count the column that it wrote."""
        places = rows.provide(self._columns_min)
        if rows.place != self._place:
            # What was captured reads and writes the buffers that were.
            self._runner.forget()
            self._place = rows.place
        inputs = list(zip(tokens[:, 0].tolist(), rows.lengths, rows.positions, strict=True))
        table = self._write(inputs, places.rows, places.column)

        def step() -> Tensor:
            cache = rows.fixed(places.rows, places.columns, table.column)
            mask = fixed_mask(table.lengths, table.column, places.columns)
            positions = (table.positions - 1).clamp(min=0)
            return self._model.run(table.tokens[:, None], mask, positions[:, None], cache)

        logits = self._runner.run(step, (places.rows, places.columns))
        rows.advance()
        return logits[: len(rows)]

    def _write(self, inputs: list[tuple[int, int, int]], rows: int, column: int) -> _Table:
        """Bring each row's token, length and position, and the column, to where steps read them."""
        if rows not in self._tables:
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                words = torch.zeros(3 * rows + 1, dtype=torch.int64, device=self._model.device)
            self._tables[rows] = words
        words = self._tables[rows]
        padded = inputs + [_DUMMY] * (rows - len(inputs))
        words.copy_(torch.tensor([*chain.from_iterable(zip(*padded, strict=True)), column]))
        return _Table(*torch.split(words, [rows, rows, rows, 1]))
