"""Packed projections: who is packed, that nothing changes, and that no input gets others' parts."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from engine.config import LoRAConfig
from engine.layers.packed import (
    MergedColumnParallelLinear,
    PackedLinear,
    PackedSlice,
    QKVParallelLinear,
    SharedCall,
)
from engine.models.causal_model import PreparedModel
from engine.models.packing import FAMILIES, find_groups, with_relatives
from tests.support.engine.engine_examples import relative_error, tiny_config


class Counted(nn.Module):
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
) -> tuple[list[nn.Linear], Counted, list[PackedSlice]]:
    torch.manual_seed(0)
    children = [nn.Linear(8, 3 + 2 * place, bias, dtype=dtype) for place, bias in enumerate(biases)]
    base = PackedLinear.of_children({f"c{place}": child for place, child in enumerate(children)})
    layer = Counted(base)
    call = SharedCall(layer, base)
    return children, layer, [PackedSlice(call, place) for place in range(len(children))]


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
    """Also where a call is abandoned half-way, repeated, or met by an equal-looking tensor."""
    with mode():
        children, layer, slices = siblings(True, True, True)
        inputs = [torch.randn(4, 8) for _ in range(3)]
        calls = [(place, x) for x in inputs for place in order]
        calls += [(order[0], inputs[0]), (order[1], inputs[1]), (order[1], inputs[1])]
        calls += [(order[0], inputs[2]), (order[0], inputs[2]), (order[1], inputs[2].clone())]
        for place, x in calls:
            assert torch.allclose(slices[place](x), children[place](x), atol=1e-6)
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
def test_a_memory_address_is_no_identity_and_nothing_is_kept_when_all_is_taken() -> None:
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


def prepare(model: LlamaForCausalLM) -> PreparedModel:
    return PreparedModel(model, LoRAConfig(), context_tokens_max=64)


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


class OtherInputs(nn.Module):
    """Three ways of not giving gate and up one input."""

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
def test_siblings_that_are_given_other_inputs_stay_apart(way: str) -> None:
    model = llama()
    model.model.layers[1].mlp = OtherInputs(model.model.layers[1].mlp, way)
    tokens = torch.randint(0, 250, (2, 9))
    with torch.no_grad():
        expected = model(tokens).logits
    layers = prepare(model).layers
    assert "model.layers.0.mlp.gate_up_proj" in layers
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= layers.keys()
    with torch.no_grad():
        assert relative_error(model(tokens).logits, expected) < 1e-6


class OwnLinear(nn.Linear):
    """What quantised layers are: linear, with a forward of its own."""


def test_what_can_not_share_a_weight_is_no_group() -> None:
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
        found = find_groups(model, names - {"model.layers.1.mlp.up_proj"})
        return [group.name.removeprefix("model.layers.") for group in found]

    qkv = ["0.self_attn.qkv_proj", "1.self_attn.qkv_proj"]
    assert groups("none") == [qkv[0], "0.mlp.gate_up_proj", qkv[1]]
    for change in ("own forward", "other dtype", "name taken"):
        assert groups(change) == ["0.mlp.gate_up_proj", qkv[1]]
    assert groups("shared") == ["0.mlp.gate_up_proj"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.parent)
def test_parents_and_children_imply_each_other(family: object) -> None:
    everyone = {family.parent, *family.children}
    for name in everyone:
        assert everyone <= with_relatives(name)
        assert {f"a.b.{other}" for other in everyone} <= with_relatives(f"a.b.{name}")
    assert with_relatives("o_proj") == {"o_proj"}


def test_the_families_base_layers_are_those_of_the_table() -> None:
    assert {family.base_type for family in FAMILIES} == {
        QKVParallelLinear,
        MergedColumnParallelLinear,
    }
