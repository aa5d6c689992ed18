"""The wrapper of routers, which score a mixture's experts with one weight and choose among them.

The choice stays the module's own code. A module is wrapped only if it was observed to compute
exactly one product with its weight; the delta is added to that product.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape


class _LinearHook(TorchFunctionMode):
    """While entered, calls `callback(product, x)` after each `linear(x, weight)` of one shape."""

    def __init__(self, shape: torch.Size, callback: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self._shape = shape
        self._callback = callback

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_product = func is torch.nn.functional.linear and len(args) > 1
        if is_product and args[1].shape == self._shape:
            self._callback(result, args[0])
        return result


class RouterWithLoRA(BaseLayerWithLoRA):
    """A router with one slice; A and B are whole on every rank."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Modules with `num_experts`, a weight [num_experts, in] and one product with it."""
        parameters = dict(layer.named_parameters())
        weight = parameters.get("weight")
        others = [one for name, one in parameters.items() if name != "weight"]
        if weight is None or weight.ndim != 2 or any(one.ndim > 2 for one in others):
            return False
        is_router = getattr(layer, "num_experts", None) == len(weight)
        return is_router and _count_products(layer, weight) == 1

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice with an output per expert."""
        experts, in_features = self.weight.shape
        return (SliceShape(in_features, experts),)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for models that read its dtype or device."""
        return self.base_layer.get_parameter("weight")

    def forward(self, hidden_states: Tensor, *others: Any) -> Any:
        """Return the router's result, computed from scores with the deltas of each row's adapter.

        hidden_states: [..., in_features], one row per token of the mapping. others: as the base
        layer's, such as a correction per expert.
        """
        if self._punica is None or self._slices is None:
            return self.base_layer(hidden_states, *others)
        with _LinearHook(self.weight.shape, self.add_lora):
            return self.base_layer(hidden_states, *others)


def _count_products(layer: nn.Module, weight: Tensor) -> int:
    """Return how often the layer multiplies a batch by a matrix of the shape of `weight`."""
    arguments = inspect.signature(layer.forward).parameters
    others = [weight.detach().new_zeros(len(weight)) for _ in range(len(arguments) - 1)]
    if len(others) > 1:
        return 0
    seen: list[Tensor] = []

    def record(product: Tensor, _x: Tensor) -> None:
        seen.append(product)

    rows = weight.detach().new_ones(2, weight.shape[1])
    try:
        with torch.inference_mode(), _LinearHook(weight.shape, record):
            layer(rows, *others)
    except MODEL_CODE_ERRORS:
        return 0
    return len(seen)
