"""Wrapped layers: who is wrapped by whom, and one layer's weights by themselves."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from engine.arena import Arena
from engine.kernels import choose_kernels
from engine.layers import BaseLayerWithLoRA, ReplicatedLinearWithLoRA, SliceShape, wrapper_of
from engine.punica import LoRAMapping, PunicaWrapper
from engine.staging import ModuleShape

SLOTS = 3


class OwnLinear(nn.Linear):
    """What quantised bases are: a linear layer with a forward of its own."""


class PackedPair(ReplicatedLinearWithLoRA):
    """Two slices, to test what the base class does for packed layers."""

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        return (SliceShape(4, 2), SliceShape(4, 5))


@pytest.mark.parametrize(
    ("layer", "wrapper"),
    [
        (nn.Linear(2, 3), ReplicatedLinearWithLoRA),
        (OwnLinear(2, 3), ReplicatedLinearWithLoRA),
        (NonDynamicallyQuantizableLinear(2, 3), None),
        (nn.Embedding(2, 3), None),
        (nn.Conv1d(2, 3, 1), None),
        (nn.LayerNorm(2), None),
        (ReplicatedLinearWithLoRA(nn.Linear(2, 3)), None),
    ],
)
def test_the_table_chooses_the_wrapper(layer: nn.Module, wrapper: type | None) -> None:
    assert wrapper_of(layer) is wrapper


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.can_replace_layer(nn.Linear(1, 1)),
        lambda layer: layer.slice_shapes,
        lambda layer: layer.slice_lora_a([None]),
        lambda layer: layer.slice_lora_b([None]),
        lambda layer: layer.create_lora_weights(None, [0]),
        lambda layer: layer(torch.ones(1)),
    ],
)
def test_an_override_that_is_missing_is_loud(use: Callable[[BaseLayerWithLoRA], object]) -> None:
    with pytest.raises(NotImplementedError):
        use(BaseLayerWithLoRA(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.set_lora(0, torch.ones(1, 1), torch.ones(1, 1)),
        lambda layer: layer.reset_lora(0),
    ],
)
def test_weights_before_create_lora_weights_are_loud(
    use: Callable[[BaseLayerWithLoRA], object],
) -> None:
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        use(ReplicatedLinearWithLoRA(nn.Linear(1, 1)))


def arena_for(*shapes: tuple[int, int]) -> Arena:
    modules = [ModuleShape(f"m{at}", *shape, at) for at, shape in enumerate(shapes)]
    arena = Arena(SLOTS, modules, 1 << 16, torch.float32, "cpu")
    arena.data.fill_(torch.nan)
    return arena


@pytest.fixture
def punica() -> PunicaWrapper:
    return PunicaWrapper(torch.device("cpu"), 8, choose_kernels("cpu"))


def bound(layer: BaseLayerWithLoRA, arena: Arena, columns: list[int], punica: PunicaWrapper):
    layer.create_lora_weights(arena, columns)
    layer.set_mapping(punica)
    return layer


@torch.no_grad()
def test_set_and_reset_change_one_layer_and_one_slot(punica: PunicaWrapper) -> None:
    torch.manual_seed(1)
    arena = arena_for((4, 3), (4, 3))
    layers = [
        bound(ReplicatedLinearWithLoRA(nn.Linear(4, 3)), arena, [column], punica)
        for column in range(2)
    ]
    x = torch.randn(2, 2, 4)
    base = [layer.base_layer(x) for layer in layers]
    assert torch.equal(layers[0](x), base[0])
    a, b = torch.randn(5, 4), torch.randn(3, 5)
    layers[0].set_lora(SLOTS - 1, a, b)
    # The last slot for two tokens of each row, an empty slot and the base for the others.
    punica.update_metadata(LoRAMapping([9, 0, 7, 9], [9, 9]), [7, None, 9])
    found, delta = layers[0](x).view(4, 3), x.view(4, 4) @ a.T @ b.T
    expected = base[0].view(4, 3).clone()
    expected[[0, 3]] += delta[[0, 3]]
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[[1, 2]], base[0].view(4, 3)[[1, 2]])
    assert torch.equal(layers[1](x), base[1])
    layers[0].reset_lora(SLOTS - 1)
    assert torch.equal(layers[0](x), base[0])
    arena.check()


@torch.no_grad()
def test_a_second_set_takes_the_place_of_the_first(punica: PunicaWrapper) -> None:
    torch.manual_seed(2)
    arena = arena_for((4, 3))
    layer = bound(ReplicatedLinearWithLoRA(nn.Linear(4, 3)), arena, [0], punica)
    free = arena.free_bytes
    layer.set_lora(0, torch.randn(8, 4), torch.randn(3, 8))
    a, b = torch.randn(1, 4), torch.randn(3, 1)
    layer.set_lora(0, a, b)
    punica.update_metadata(LoRAMapping([5], [5]), [5])
    x = torch.randn(1, 4)
    assert torch.allclose(layer(x), layer.base_layer(x) + x @ a.T @ b.T, atol=1e-5)
    layer.reset_lora(0)
    assert arena.free_bytes == free


@torch.no_grad()
def test_a_packed_layer_may_lack_a_slice(punica: PunicaWrapper) -> None:
    torch.manual_seed(3)
    layer = bound(PackedPair(nn.Linear(4, 7)), arena_for((4, 2), (4, 5)), [0, 1], punica)
    a, b = torch.randn(2, 4), torch.randn(5, 2)
    layer.set_lora(1, [None, a], [None, b])
    punica.update_metadata(LoRAMapping([6], [6]), [None, 6])
    x = torch.randn(1, 4)
    expected = layer.base_layer(x)
    expected[:, 2:] += x @ a.T @ b.T
    assert torch.allclose(layer(x), expected, atol=1e-5)
    # What the next adapter does not touch must not be left from this one.
    layer.set_lora(1, [a[:1], None], [b[:2, :1], None])
    expected = layer.base_layer(x)
    expected[:, :2] += x @ a[:1].T @ b[:2, :1].T
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("lora_a", "lora_b"),
    [
        ([torch.ones(1, 4), None], [None, None]),
        ([None, torch.ones(1, 4)], [torch.ones(2, 1), None]),
        ([torch.ones(1, 4)], [torch.ones(2, 1)]),
        (torch.ones(1, 4), torch.ones(2, 1)),
    ],
)
def test_halves_and_other_numbers_of_slices_are_refused_before_anything_moves(
    lora_a: object, lora_b: object, punica: PunicaWrapper
) -> None:
    arena = arena_for((4, 2), (4, 5))
    layer = bound(PackedPair(nn.Linear(4, 7)), arena, [0, 1], punica)
    layer.set_lora(0, [torch.ones(1, 4), None], [torch.ones(2, 1), None])
    before = arena.host_offsets.clone()
    with pytest.raises(ValueError):
        layer.set_lora(0, lora_a, lora_b)
    assert torch.equal(arena.host_offsets, before)


def test_columns_are_as_many_as_slices() -> None:
    with pytest.raises(ValueError, match="2 columns for a layer of 1"):
        ReplicatedLinearWithLoRA(nn.Linear(4, 3)).create_lora_weights(arena_for((4, 3)), [0, 1])
