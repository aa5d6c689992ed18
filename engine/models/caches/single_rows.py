"""Rows that a model runs one by one, as its own `generate` does.

What a row keeps between two tokens is the model's business: a cache of any kind, under any name,
or nothing, and then all its tokens are computed again.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.models.caches.layer_states import states_bytes
from engine.models.caches.module_states import (
    ModuleState,
    ModuleValues,
    read_states,
    write_states,
)
from engine.models.caches.row_cache import RowStates


@dataclass
class _Row:
    """One row: its tokens, and what the model wants to be given with the next ones.

    `modules`: what the model keeps for it in its modules.
    """

    tokens: list[int] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    modules: ModuleValues = ()


class SingleRows(RowStates):
    """The states of rows that are never computed together."""

    def __init__(
        self,
        lengths: Sequence[int] = (),
        offsets: Sequence[int] = (),
        with_positions: bool = False,
        module_states: Sequence[ModuleState] = (),
    ) -> None:
        """`with_positions`: the model accepts `position_ids`. `module_states`: of the model."""
        super().__init__(lengths, offsets)
        self._module_states = module_states
        self._with_positions = with_positions
        self._rows = [_Row() for _ in self.lengths]

    @property
    def size_bytes(self) -> int:
        """The bytes of all rows' states."""
        return sum(states_bytes((row.arguments, row.modules)) for row in self._rows)

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
        state, is_first = self._rows[row], not self._rows[row].tokens
        state.tokens += tokens.tolist()
        device = model.device
        if is_first:
            state.arguments = {"use_cache": True}
        ids = torch.tensor([state.tokens], device=device)
        state.arguments["attention_mask"] = torch.ones_like(ids)
        if self._with_positions:
            state.arguments |= _positions(model, ids, state.arguments["attention_mask"])
        has_cache = any(name.startswith(_STATES) for name in state.arguments)
        inputs = model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=len(tokens) if has_cache and not is_first else None,
            is_first_iteration=is_first,
            **state.arguments,
        )
        write_states(self._module_states, state.modules)
        output = model(**inputs, return_dict=True)
        state.modules = read_states(self._module_states)
        state.arguments = model._update_model_kwargs_for_generation(output, state.arguments)
        logits: Tensor = output.logits
        return logits


def _positions(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the argument `position_ids`, without which some models count for themselves."""
    positions = model._prepare_position_ids_for_generation(ids, {"attention_mask": mask})
    return {} if positions is None else {"position_ids": positions}


_STATES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""Names under which models return their states."""
