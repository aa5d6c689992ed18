"""Layers whose base layer is only a product with its weight."""

import torch
from torch import Tensor, nn

from engine.kernels import choose_kernels
from engine.layers.logits import LogitsProcessorWithLoRA
from engine.layers.merged import MergedColumnParallelLinearWithLoRA
from engine.layers.packed import MergedColumnParallelLinear
from engine.layers.replicated import ReplicatedLinearWithLoRA
from engine.punica import PunicaWrapper


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
