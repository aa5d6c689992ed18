"""States that a model keeps in attributes of its modules instead of in a cache.

They belong to the text that was computed last, so rows that take turns each need their own.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
