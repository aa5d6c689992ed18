"""Layers whose base layer is only a product with its weight."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

from loradock.engine.kernels.packed_linear import PackedWeight, has_onednn
from loradock.engine.layers.linear import (
    ClassificationHeadWithLoRA,
    LogitsProcessorWithLoRA,
    ReplicatedLinearWithLoRA,
)
from loradock.engine.layers.packed import MergedColumnParallelLinear
from loradock.engine.layers.parallel import MergedColumnParallelLinearWithLoRA


class OwnLinear(nn.Linear):
    """A model's own kind of linear layer, which may compute more than a product."""


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_plain_base_layers_are_packed_and_others_are_not(
    dtype: torch.dtype, is_shared: bool
) -> None:
    x, parts = torch.randn(3, 8), [nn.Linear(8, 4), nn.Linear(8, 6, bias=False)]
    packed = MergedColumnParallelLinear.of_layers(parts)
    wrapped = [
        (ReplicatedLinearWithLoRA(nn.Linear(8, 5)), True),
        (LogitsProcessorWithLoRA(nn.Linear(8, 9, bias=False)), True),
        (MergedColumnParallelLinearWithLoRA(packed), True),
        (ReplicatedLinearWithLoRA(OwnLinear(8, 5)), False),
        (ReplicatedLinearWithLoRA(with_output_hook(nn.Linear(8, 5))), False),
        (ClassificationHeadWithLoRA(nn.Linear(8, 2)), False),
    ]
    for layer, is_plain in wrapped:
        layer.to(dtype)
        rows = x.to(dtype)
        expected, weight = layer(rows), layer.base_layer.weight.clone()
        layer.pack_weights(lambda _: is_shared)
        torch.testing.assert_close(layer(rows), expected)
        kept = layer.base_layer.weight
        is_packed = is_plain and not is_shared and has_onednn(dtype)
        assert isinstance(kept, PackedWeight) == is_packed
        assert torch.equal(kept, weight)
        assert layer.affine_shapes == type(layer)(layer.base_layer).affine_shapes


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
    layer.pack_weights(lambda _: False)
    found = layer(x)
    torch.testing.assert_close(found, base(x))
