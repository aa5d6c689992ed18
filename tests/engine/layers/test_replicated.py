"""Layers whose base layer is only a product with its weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm

from loradock.engine.kernels import choose_kernels
from loradock.engine.layers.logits import LogitsProcessorWithLoRA
from loradock.engine.layers.merged import MergedColumnParallelLinearWithLoRA
from loradock.engine.layers.packed import MergedColumnParallelLinear
from loradock.engine.layers.replicated import ReplicatedLinearWithLoRA
from loradock.engine.punica import PunicaWrapper


class OwnLinear(nn.Linear):
    """A model's own kind of linear layer, which may compute more than a product."""


def doubled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return 2.0 * nn.functional.linear(x, weight, bias)


def test_plain_base_layers_are_computed_by_the_kernels_product_if_there_is_one() -> None:
    x, parts = torch.randn(3, 8), [nn.Linear(8, 4), nn.Linear(8, 6, bias=False)]
    packed = MergedColumnParallelLinear.of_layers(parts)
    wrapped = [
        (ReplicatedLinearWithLoRA(nn.Linear(8, 5)), 2.0),
        (LogitsProcessorWithLoRA(nn.Linear(8, 9, bias=False)), 2.0),
        (MergedColumnParallelLinearWithLoRA(packed), 2.0),
        (ReplicatedLinearWithLoRA(OwnLinear(8, 5)), 1.0),
    ]
    kernels = choose_kernels("cpu")
    for layer, factor in wrapped:
        expected = layer.base_layer(x)
        for own, times in ((kernels, 1.0), (kernels._replace(base_linear=doubled), factor)):
            layer.set_mapping(PunicaWrapper(torch.device("cpu"), 8, own))
            torch.testing.assert_close(layer(x), times * expected)


def test_a_layer_computes_what_the_kernels_leave_to_it() -> None:
    kernels = choose_kernels("cpu")._replace(base_linear=lambda *_: None)
    layer = ReplicatedLinearWithLoRA(nn.Linear(8, 5))
    layer.set_mapping(PunicaWrapper(torch.device("cpu"), 8, kernels))
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), layer.base_layer(x))


def with_output_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda _layer, _inputs, y: y + 1.0)
    return layer


def with_input_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_pre_hook(lambda _layer, inputs: (inputs[0] - 1.0,))
    return layer


def with_other_forward(layer: nn.Linear) -> nn.Linear:
    """Replace the forward of one layer, as offloading does."""
    own = layer.forward
    layer.forward = lambda x: own(x) * 3.0
    return layer


@pytest.mark.parametrize(
    "change", [with_output_hook, with_input_hook, with_other_forward, weight_norm, spectral_norm]
)
def test_what_a_program_adds_to_a_layer_is_computed(
    change: Callable[[nn.Linear], nn.Linear],
) -> None:
    base = change(nn.Linear(8, 5)).eval().requires_grad_(False)
    # Before the first call, hooks have not computed the weight.
    x, layer = torch.randn(3, 8), ReplicatedLinearWithLoRA(base)
    layer.set_mapping(
        PunicaWrapper(
            torch.device("cpu"), 8, choose_kernels("cpu")._replace(base_linear=nn.functional.linear)
        )
    )
    found = layer(x)
    torch.testing.assert_close(found, base(x))
