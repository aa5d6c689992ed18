"""Rows that a model runs one by one, as its own `generate` does.

What a row keeps between two tokens is the model's business: a cache of any kind, under any name,
or nothing, and then all its tokens are computed again.

A state can also be in attributes of its modules; it belongs to the text that was computed last, so
rows that take turns each need a copy.
"""

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.models.caches.row_cache import RowStates
from loradock.engine.models.caches.state_cache import states_bytes
from loradock.engine.models.library.generation import next_inputs, state_after
from loradock.engine.models.library.names import PreTrainedModel

ModuleValues = tuple[Any, ...]
"""The value of each state; None before a first forward pass."""


class ModuleState(NamedTuple):
    """An attribute `name` of `module` that a forward pass sets to a tensor."""

    module: nn.Module
    name: str


def find_module_states(model: nn.Module) -> tuple[ModuleState, ...]:
    """Return the attributes that a forward pass with a cache sets, and clear them."""
    before = {
        (module, name): value for module in model.modules() for name, value in vars(module).items()
    }
    ids = torch.arange(3, device=next(model.parameters()).device)[None]
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    with torch.inference_mode():
        model(ids, **({"use_cache": True} if has_cache else {}))
    states = tuple(
        ModuleState(module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value is not before.get((module, name))
    )
    write_states(states, ())
    return states


def read_states(states: Sequence[ModuleState]) -> ModuleValues:
    """Return the values of a row after its forward pass."""
    return tuple(getattr(state.module, state.name) for state in states)


def write_states(states: Sequence[ModuleState], values: ModuleValues) -> None:
    """Set the values of a row before its forward pass; none are those of a new row."""
    for state, value in zip(states, values or [None] * len(states), strict=True):
        setattr(state.module, state.name, value)


@dataclass
class _Row:
    """One row: its tokens, and what the model keeps for it: by argument, and in its modules."""

    tokens: list[int] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    modules: ModuleValues = ()


class SingleRows(RowStates):
    """The states of rows that are never computed together."""

    def __init__(
        self,
        lengths: Sequence[int] = (),
        offsets: Sequence[int] = (),
        with_positions: bool = False,
        module_states: Sequence[ModuleState] = (),
        with_states: bool = True,
    ) -> None:
        """`with_positions`: the model accepts `position_ids`. `module_states`: of the model.

        `with_states` False: nothing is kept but the tokens, and all are computed at each step.
        """
        super().__init__(lengths, offsets)
        self._with_states = with_states
        self._module_states = module_states
        self._with_positions = with_positions
        self._rows = [_Row() for _ in self.lengths]

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows' states."""
        return sum(states_bytes((row.state, row.modules)) for row in self._rows)

    def join(self, other: "SingleRows") -> None:
        """Append the rows of `other`, which must not be used afterwards."""
        self._rows += other._rows
        self._join_counts(other)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self._rows = [self._rows[row] for row in rows]
        self._keep_counts(rows)

    def take(self, row: int) -> "SingleRows":
        """Remove a row and return it in a cache of its own."""
        taken = copy(self)
        taken.keep([row])
        self.keep([other for other in range(len(self)) if other != row])
        return taken

    def forward(self, model: PreTrainedModel, row: int, tokens: Tensor) -> Tensor:
        """Return logits, [1, columns, vocabulary], of which the last are those of the new tokens.

        tokens: [new] int64. A model without states has columns for all tokens.
        """
        one, device = self._rows[row], model.device
        one.tokens += tokens.tolist()
        inputs = next_inputs(
            model,
            torch.tensor([one.tokens], device=device),
            one.state,
            len(tokens) if one.state else None,
            with_positions=self._with_positions,
        )
        write_states(self._module_states, one.modules)
        output = model(**inputs, return_dict=True)
        one.modules = read_states(self._module_states)
        one.state = state_after(model, output) if self._with_states else {}
        logits: Tensor = output.logits
        return logits
