"""A router: the layer that scores a mixture's experts, with its own weight and its own choosing.

What it is: the wrapper of router modules that multiply by one weight of theirs and then choose.
What it is not: the choice, which stays the module's own code. One rule: a module is wrapped only
if it was seen to make exactly one product with its weight; the delta is added to that product.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.layers.base import BaseLayerWithLoRA, SliceShape

_FAILURES: Final = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What foreign code raises where it is called in a way it does not support."""


class _AtProduct(TorchFunctionMode):
    """While entered, calls `seen(product, x)` after each `linear(x, weight)` of one shape."""

    def __init__(self, shape: torch.Size, seen: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self._shape = shape
        self._seen = seen

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
            self._seen(result, args[0])
        return result


class RouterWithLoRA(BaseLayerWithLoRA):
    """A router with one slice; A and B are whole, on every rank."""

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """A module with `num_experts`, a weight [num_experts, in] and one product with it."""
        parameters = dict(layer.named_parameters())
        weight = parameters.get("weight")
        if weight is None or not parameters.keys() <= {"weight", "bias"} or weight.ndim != 2:
            return False
        is_router = getattr(layer, "num_experts", None) == len(weight)
        return is_router and _products(layer, weight) == 1

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice, as wide as there are experts."""
        experts, in_features = self.weight.shape
        return (SliceShape(in_features, experts),)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for models that ask for its dtype or device."""
        return self.base_layer.get_parameter("weight")

    def forward(self, hidden_states: Tensor) -> Any:
        """What the router answers, its scores with the deltas of each row's adapter.

        hidden_states: [..., in_features], one row a token of the mapping.
        """
        if self._punica is None or self._slices is None:
            return self.base_layer(hidden_states)
        with _AtProduct(self.weight.shape, self.add_lora):
            return self.base_layer(hidden_states)


def _products(layer: nn.Module, weight: Tensor) -> int:
    """How many products with a matrix like `weight` the layer makes of some rows."""
    if len(inspect.signature(layer.forward).parameters) != 1:
        return 0
    seen: list[Tensor] = []

    def see(product: Tensor, _x: Tensor) -> None:
        seen.append(product)

    rows = weight.detach().new_ones(2, weight.shape[1])
    try:
        with torch.inference_mode(), _AtProduct(weight.shape, see):
            layer(rows)
    except _FAILURES:
        return 0
    return len(seen)
