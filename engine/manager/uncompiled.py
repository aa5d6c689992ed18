"""Wrapped layers in a model that is compiled: the compiler leaves them as they are.

A layer reads the batch's mapping and views of the arena, which change between two calls. A graph of
them would be compiled anew for each combination of adapters, and inductor does not compile them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from loradock.engine.layers import BaseLayerWithLoRA
from loradock.engine.layers.packed import PackedSlice


def keep_uncompiled(model: nn.Module) -> None:
    """Let the graphs of a compiled model end before each wrapped layer, and continue after it."""
    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA | PackedSlice):
            _end_graphs(layer)


def _end_graphs(layer: nn.Module) -> None:
    forward: Callable[..., Any] = layer.forward

    @wraps(forward)
    def call(*inputs: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _uncompiled(forward, *inputs, **options)
        return forward(*inputs, **options)

    layer.forward = call


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="layers with adapters read the batch's mapping; compile without fullgraph"
)
def _uncompiled(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return forward(*inputs, **options)
