"""Calls of single layers in the words of vLLM's documentation, and what they refuse."""

import pytest
import torch
from torch import Tensor, nn

from loradock.engine.errors import NotFinite
from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import (
    BaseLayerWithLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
    MergedColumnParallelLinear,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinear,
    ReplicatedLinearWithLoRA,
)
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from tests.support.models.expert_examples import EXPERTS, HIDDEN, make_experts

torch.set_num_threads(1)
SLOTS, RANK_MAX, IN = 3, 4, 6


def bound(layer: BaseLayerWithLoRA, name: str = "m") -> BaseLayerWithLoRA:
    """Return the layer in an arena of its own, with one row of each slot mapped."""
    shapes = layer.module_shapes(name, 0)
    arena = Arena(SLOTS, shapes, 1 << 20, torch.float32, "cpu")
    punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, choose_kernels("cpu"))
    punica.update_metadata(LoRAMapping([1, 2, 3], [1, 2, 3]), [1, 2, 3])
    layer.create_lora_weights(arena, [shape.index for shape in shapes])
    layer.set_mapping(punica_wrapper=punica)
    return layer


def linear() -> BaseLayerWithLoRA:
    torch.manual_seed(1)
    return bound(ReplicatedLinearWithLoRA(nn.Linear(IN, 5)))


def packed(kind: type, wrapper: type, *widths: int) -> BaseLayerWithLoRA:
    torch.manual_seed(2)
    layers = {f"{at}_proj": nn.Linear(IN, width) for at, width in zip("qkv", widths, strict=False)}
    return bound(wrapper(kind.of_children(layers)))


PACKED = [
    (MergedColumnParallelLinear, MergedColumnParallelLinearWithLoRA, (4, 4)),
    (QKVParallelLinear, MergedQKVParallelLinearWithLoRA, (4, 2, 2)),
]


@torch.no_grad()
def test_a_slot_is_called_index() -> None:
    layer, x = linear(), torch.randn(3, IN)
    a, b = torch.randn(2, IN), torch.randn(5, 2)
    layer.set_lora(index=1, lora_a=a, lora_b=b)
    expected = layer.base_layer(x)
    expected[1] += x[1] @ a.T @ b.T
    assert torch.allclose(layer(x), expected, atol=1e-5)
    layer.reset_lora(index=1)
    assert torch.equal(layer(x), layer.base_layer(x))


@pytest.mark.parametrize(("kind", "wrapper", "widths"), PACKED)
@torch.no_grad()
def test_one_tensor_for_a_packed_layer_covers_its_slices(
    kind: type, wrapper: type, widths: tuple[int, ...]
) -> None:
    layer, x = packed(kind, wrapper, *widths), torch.randn(3, IN)
    a, b = torch.randn(2, IN), torch.randn(sum(widths), 2)
    layer.set_lora(0, a, b)
    found = layer(x)
    all_a, all_b = layer.expand_packed_lora(a, b)
    assert len(all_a) == len(all_b) == len(widths)
    assert torch.equal(torch.cat(all_b), b)
    layer.set_lora(0, all_a, all_b)
    assert torch.equal(layer(x), found)
    assert torch.allclose(found[0], layer.base_layer(x)[0] + x[0] @ a.T @ b.T, atol=1e-5)


def test_a_tensor_is_sliced_as_a_tensor_and_a_list_as_a_list() -> None:
    layer, a = linear(), torch.randn(2, IN)
    assert torch.equal(layer.slice_lora_a(a), a)
    assert isinstance(layer.slice_lora_b([torch.ones(5, 2)]), list)
    pair = packed(*PACKED[0][:2], 4, 4)
    for call in (pair.slice_lora_a, pair.slice_lora_b):
        with pytest.raises(ValueError, match=r"1 tensors for a layer of 2 slices \(q_proj, k_proj"):
            call(torch.ones(2, IN))


@pytest.mark.parametrize(
    ("a", "b", "error", "text"),
    [
        (torch.full((2, IN), torch.nan), torch.ones(5, 2), NotFinite, "NaN or infinity"),
        (torch.ones(2, IN), torch.full((5, 2), torch.inf), NotFinite, "NaN or infinity"),
        (torch.ones(2, IN).double() * 1e300, torch.ones(5, 2), NotFinite, "float32"),
        (torch.ones(5, IN), torch.ones(5, 5), ValueError, "rank is 5; 1 to 4"),
        (torch.ones(2, IN - 1), torch.ones(5, 2), ValueError, "needs A"),
        ([torch.ones(2, IN)] * 2, [torch.ones(5, 2)] * 2, ValueError, "2 tensors for a layer of 1"),
        (torch.ones(2, IN), [None], ValueError, "A without B"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    a: Tensor, b: Tensor, error: type[Exception], text: str
) -> None:
    layer = linear()
    layer.set_lora(0, torch.ones(1, IN), torch.ones(5, 1))
    before = layer.lora_a_stacked[0][0].clone()
    with pytest.raises(error, match=text):
        layer.set_lora(0, a, b)
    assert torch.equal(layer.lora_a_stacked[0][0], before)


def test_layers_have_the_documented_properties() -> None:
    layer = packed(*PACKED[1][:2], 4, 2, 2)
    assert (layer.tp_rank, layer.tp_size, layer.n_slices) == (0, 1, 3)
    assert (layer.input_size, layer.output_size) == (IN, 8)
    assert layer.output_sizes == layer.output_slices == (4, 2, 2)
    assert layer.lora_a_stacked == ((None,) * SLOTS,) * 3
    a, b = torch.randn(2, IN), torch.randn(2, 2)
    layer.set_lora(1, [None, a, None], [None, b, None])
    assert torch.equal(layer.lora_b_stacked[1][1], b)
    assert torch.equal(layer.lora_a_stacked[1][1], a)
    layer.reset_lora(1)
    assert layer.lora_b_stacked == ((None,) * SLOTS,) * 3


def square(wrapper: type[ExpertsWithLoRA]) -> BaseLayerWithLoRA:
    torch.manual_seed(4)
    return bound(wrapper(make_experts("mixtral", intermediate_size=HIDDEN)), "experts")


@pytest.mark.parametrize("wrapper", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
def test_experts_take_w1_w2_and_w3_in_this_order(wrapper: type[ExpertsWithLoRA]) -> None:
    """Hidden and intermediate sizes are equal, so that shapes could not distinguish w2 and w3."""
    layer = square(wrapper)
    all_a = [torch.full((EXPERTS, 2, HIDDEN), value) for value in (1.0, 2.0, 3.0)]
    all_b = [torch.full((EXPERTS, HIDDEN, 2), value) for value in (1.0, 2.0, 3.0)]
    layer.set_lora(0, all_a, all_b)
    found = {
        shape.name: views[0][0, 0, 0].item()
        for shape, views in zip(layer.slice_shapes, layer.lora_a_stacked, strict=True)
        if views[0] is not None
    }
    assert found == {"gate_proj": 1.0, "down_proj": 2.0, "up_proj": 3.0}
    assert layer.adapter_enabled(0)
    with pytest.raises(ValueError, match="1 tensors for experts that take"):
        layer.set_lora(0, all_a[:1], all_b[:1])


def test_experts_take_w13_and_w2_where_both_are_one_tensor() -> None:
    layer = square(FusedMoE3DWithLoRA)
    w13 = (torch.randn(EXPERTS, 2, HIDDEN), torch.randn(EXPERTS, 2 * HIDDEN, 2))
    w2 = (torch.randn(EXPERTS, 2, HIDDEN), torch.randn(EXPERTS, HIDDEN, 2))
    layer.set_lora(1, [w13[0], w2[0]], [w13[1], w2[1]])
    assert torch.equal(layer.w13_lora_b_stacked[0][1], w13[1])
    assert torch.equal(layer.w2_lora_a_stacked[0][1], w2[0])
    assert (layer.hidden_size, layer.global_num_experts) == (HIDDEN, EXPERTS)
    assert (layer.local_num_experts, layer.use_ep, layer.ep_rank) == (EXPERTS, False, 0)
    with pytest.raises(ValueError, match="2 tensors for experts"):
        square(FusedMoEWithLoRA).set_lora(1, [w13[0], w2[0]], [w13[1], w2[1]])
