"""Modules that are not fused because they can't be run as the comparison runs them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.kernels.interface import FusedOperations
from loradock.engine.layers.linear import ReplicatedLinearWithLoRA
from loradock.engine.layers.router import RouterWithLoRA
from loradock.engine.models.fusing import _fuse_rotation, fuse


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (offset + weight)


def unused(*_: object) -> Any:
    raise AssertionError("nothing is equal to a module that fails")


OPERATIONS = FusedOperations(rms_norm, unused, unused, unused)


class Failing(nn.Module):
    """A module that can be taken for any kind that is compared, and fails."""

    def __init__(self, error: type[Exception], *children: str) -> None:
        super().__init__()
        self.error, self.eps = error, 1e-6
        for name in children:
            self.add_module(name, nn.Linear(4, 4) if name.endswith("proj") else Norm())
        if not children:
            self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, **named: Any) -> Tensor:
        raise self.error


class Norm(nn.Module):
    """The formula of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, 0.0)


class FailingLinear(nn.Linear):
    """A linear layer with a forward of its own, and what a router has."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(4, 3, bias=False)
        self.error, self.num_experts = error, 3

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


KINDS = {
    "norm": (),
    "gated unit": ("gate_proj", "up_proj", "down_proj"),
    "layer": ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
}


@pytest.mark.parametrize("error", MODEL_CODE_ERRORS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_fails_alone_stays_as_it_is(kind: str, error: type[Exception]) -> None:
    model = Failing(error, *KINDS[kind])
    fused = fuse(model, OPERATIONS)
    assert type(model) is Failing
    assert fused == (("Norm",) if kind == "layer" else ())


@pytest.mark.parametrize("error", MODEL_CODE_ERRORS)
def test_a_rotation_a_router_and_a_product_that_fail_alone_are_kept(error: type[Exception]) -> None:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        raise error

    module = SimpleNamespace(apply_rotary_pos_emb=rotate)
    assert not _fuse_rotation(module, torch.ones(1), OPERATIONS)
    assert module.apply_rotary_pos_emb is rotate
    assert not RouterWithLoRA.can_replace_layer(FailingLinear(error))
    assert ReplicatedLinearWithLoRA.can_replace_layer(FailingLinear(error))


def test_a_norm_that_needs_a_gate_stays_as_it_is() -> None:
    norm = KimiLinearRMSNormGated(4)
    assert fuse(norm, OPERATIONS) == ()
    assert type(norm) is KimiLinearRMSNormGated
