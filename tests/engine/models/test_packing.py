"""Packed projections: the rules of packing, equal results, and no result of another input."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from loradock.engine.config import LoRAConfig
from loradock.engine.layers.packed import (
    MergedColumnParallelLinear,
    PackedLinear,
    PackedSlice,
    QKVParallelLinear,
    SharedCall,
)
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.packing import PACKING_RULES, find_packing_groups, with_implied_targets
from tests.support.engine.engine_examples import relative_error, tiny_config


class CountingLayer(nn.Module):
    """A packed layer that counts its calls."""

    def __init__(self, base_layer: PackedLinear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.base_layer(x)


def siblings(
    *biases: bool, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Linear], CountingLayer, list[PackedSlice]]:
    torch.manual_seed(0)
    children = [nn.Linear(8, 3 + 2 * index, bias, dtype=dtype) for index, bias in enumerate(biases)]
    base = PackedLinear.of_children({f"c{index}": child for index, child in enumerate(children)})
    layer = CountingLayer(base)
    call = SharedCall(layer, base)
    return children, layer, [PackedSlice(call, index) for index in range(len(children))]


@pytest.mark.parametrize("biases", [(False,) * 3, (True,) * 3, (True, False, True)])
@torch.no_grad()
def test_children_answer_as_before_with_one_call(biases: tuple[bool, ...]) -> None:
    children, layer, slices = siblings(*biases)
    x = torch.randn(2, 4, 8)
    for child, part in zip(children, slices, strict=True):
        assert torch.allclose(part(x), child(x), atol=1e-6)
        assert torch.equal(part.weight, child.weight)
        assert (part.in_features, part.out_features) == (8, child.out_features)
        assert (part.bias is None) == (child.bias is None)
        assert child.bias is None or torch.equal(part.bias, child.bias)
    assert layer.calls == 1


@pytest.mark.parametrize("rows", [0, 1, 2, 129])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_any_number_of_rows_is_the_same_product(mode: type, bias: bool, rows: int) -> None:
    children, layer, _ = siblings(bias, bias, False)
    with mode():
        for x in (torch.randn(rows, 8), torch.randn(1, rows, 8), torch.randn(8, rows).T):
            expected = torch.cat([child(x) for child in children], dim=-1)
            assert torch.allclose(layer(x), expected, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_each_input_gets_its_own_parts(mode: type, order: tuple[int, ...]) -> None:
    """Also where a call is abandoned, repeated, or followed by an equal tensor."""
    with mode():
        children, layer, slices = siblings(True, True, True)
        inputs = [torch.randn(4, 8) for _ in range(3)]
        calls = [(index, x) for x in inputs for index in order]
        calls += [(order[0], inputs[0]), (order[1], inputs[1]), (order[1], inputs[1])]
        calls += [(order[0], inputs[2]), (order[0], inputs[2]), (order[1], inputs[2].clone())]
        for index, x in calls:
            assert torch.allclose(slices[index](x), children[index](x), atol=1e-6)
    assert layer.calls == 3 + 6


@torch.no_grad()
def test_an_input_that_was_written_in_place_is_computed_anew() -> None:
    children, layer, slices = siblings(True, True)
    x = torch.randn(4, 8)
    slices[0](x)
    x.mul_(2)
    assert torch.allclose(slices[1](x), children[1](x), atol=1e-6)
    assert layer.calls == 2


@torch.inference_mode()
def test_an_address_is_no_identity_and_no_input_is_kept_after_the_last_slice() -> None:
    children, _, slices = siblings(False, False)
    data = torch.randn(4, 8)
    slices[0](data)
    # The same memory, another tensor, other contents.
    alias = data[:]
    alias.mul_(3)
    assert alias.data_ptr() == data.data_ptr()
    assert torch.allclose(slices[1](alias), children[1](alias), atol=1e-6)
    x = torch.randn(4, 8)
    seen = weakref.ref(x)
    for part in slices:
        part(x)
    del x
    gc.collect()
    assert seen() is None


def prepare(model: LlamaForCausalLM) -> CausalModel:
    return CausalModel(model, LoRAConfig(), max_model_len=64)


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}])
@torch.no_grad()
def test_the_models_own_code_answers_as_before(changes: dict[str, bool]) -> None:
    tokens = torch.randint(0, 250, (2, 9))
    expected = llama(**changes)(tokens).logits
    model = prepare(llama(**changes)).model
    assert type(model.model.layers[0].self_attn.q_proj) is PackedSlice
    assert relative_error(model(tokens).logits, expected) < 1e-6
    weights = sum(p.numel() for p in model.parameters())
    assert weights == sum(p.numel() for p in llama(**changes).parameters())


class UnlikeInputs(nn.Module):
    """An MLP whose gate and up receive different inputs, in one of three ways."""

    def __init__(self, mlp: nn.Module, way: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        if self.way == "written":
            x = x.mul_(1.5)
        elif self.way == "scaled":
            x = x * 1.5
        else:
            x = x.clone()
        return self.down_proj(torch.nn.functional.silu(gate) * self.up_proj(x))


@pytest.mark.parametrize("way", ["written", "scaled", "copied"])
def test_siblings_with_unlike_inputs_are_not_packed(way: str) -> None:
    model = llama()
    model.model.layers[1].mlp = UnlikeInputs(model.model.layers[1].mlp, way)
    tokens = torch.randint(0, 250, (2, 9))
    with torch.no_grad():
        expected = model(tokens).logits
    layers = prepare(model).layers
    assert "model.layers.0.mlp.gate_up_proj" in layers
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= layers.keys()
    with torch.no_grad():
        assert relative_error(model(tokens).logits, expected) < 1e-6


class OwnLinear(nn.Linear):
    """A linear layer with a forward of its own, as quantised layers have."""


def test_projections_that_can_not_share_a_weight_are_no_group() -> None:
    def groups(change: str) -> list[str]:
        model = llama()
        attention = model.model.layers[0].self_attn
        if change == "own forward":
            attention.k_proj = OwnLinear(32, 16, bias=False)
        elif change == "other dtype":
            attention.k_proj.to(torch.float64)
        elif change == "shared":
            model.model.layers[1].self_attn.k_proj = attention.k_proj
        elif change == "name taken":
            attention.qkv_proj = nn.Identity()
        names = {name for name, _ in model.named_modules(remove_duplicate=False)}
        found = find_packing_groups(model, names - {"model.layers.1.mlp.up_proj"})
        return [group.name.removeprefix("model.layers.") for group in found]

    qkv = ["0.self_attn.qkv_proj", "1.self_attn.qkv_proj"]
    assert groups("none") == [qkv[0], "0.mlp.gate_up_proj", qkv[1]]
    for change in ("own forward", "other dtype", "name taken"):
        assert groups(change) == ["0.mlp.gate_up_proj", qkv[1]]
    assert groups("shared") == ["0.mlp.gate_up_proj"]


@pytest.mark.parametrize("rule", PACKING_RULES, ids=lambda rule: rule.parent)
def test_parents_and_children_imply_each_other(rule: object) -> None:
    names = {rule.parent, *rule.children}
    for name in names:
        assert names <= with_implied_targets(name)
        assert {f"a.b.{other}" for other in names} <= with_implied_targets(f"a.b.{name}")
    assert with_implied_targets("o_proj") == {"o_proj"}


def test_the_rules_base_layers_are_those_of_the_table() -> None:
    assert {rule.base_type for rule in PACKING_RULES} == {
        QKVParallelLinear,
        MergedColumnParallelLinear,
    }
