"""Which image layers are wrapped, by their inputs for two images, and what is refused."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlavaForConditionalGeneration

from loradock.engine.config import LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import MappingType
from tests.support.models.image_text_examples import KINDS, TEXT, VISION, build

CONFIG = LoRAConfig(enable_tower_connector_lora=True)
PROJECTOR = "model.multi_modal_projector"
LAST = f"{PROJECTOR}.linear_2"
TOWER = {
    "llava": ("qkv_proj", "out_proj", "fc1", "fc2"),
    "gemma3": ("qkv_proj", "out_proj", "fc1", "fc2"),
    "idefics3": ("position_embedding", "qkv_proj", "out_proj", "fc1", "fc2"),
    "qwen2_vl": ("qkv", "proj", "fc1", "fc2"),
    "qwen2_5_vl": ("qkv", "proj", "gate_up_proj", "down_proj"),
}
CONNECTOR = {
    "llava": (f"{PROJECTOR}.linear_1", LAST),
    "gemma3": (),
    "idefics3": ("model.connector.modality_projection.proj",),
    "qwen2_vl": ("model.visual.merger.mlp.0", "model.visual.merger.mlp.2"),
    "qwen2_5_vl": ("model.visual.merger.mlp.0", "model.visual.merger.mlp.2"),
}


def layers_of(model: CausalModel, part: MappingType) -> list[str]:
    return [name for name in model.layers if model.parts[name] is part]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_ends_where_rows_become_fewer_or_the_encoder_ends(kind: str) -> None:
    model = CausalModel(build(kind), CONFIG)
    tower = {name.rpartition(".")[2] for name in layers_of(model, MappingType.TOWER)}
    assert tower == set(TOWER[kind])
    assert layers_of(model, MappingType.CONNECTOR) == list(CONNECTOR[kind])
    assert model.image_layers.isdisjoint(layers_of(model, MappingType.LANGUAGE))


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_option_towers_and_connectors_stay_as_they_are(kind: str) -> None:
    model = CausalModel(build(kind), LoRAConfig())
    assert set(model.parts.values()) == {MappingType.LANGUAGE}
    assert model.image_layers.issuperset(CONNECTOR[kind])
    assert all(isinstance(model.model.get_submodule(n), nn.Linear) for n in CONNECTOR[kind])


class ChangedActivation(nn.Module):
    """A function between a projector's two layers, from [images, rows, width]."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        return self._change(x)


UNMAPPABLE = {
    "swaps the images": lambda x: x.flip(0),
    "adds the other image": lambda x: x + 0.1 * x.sum(0, keepdim=True),
    "puts rows first": lambda x: x.transpose(0, 1),
    "takes a row more of the batch": lambda x: torch.cat([x, x[:1]]),
    "takes one image's rows": lambda x: x[:1],
}


@pytest.mark.parametrize("change", UNMAPPABLE)
def test_a_layer_that_receives_mixed_images_stays_unwrapped(change: str) -> None:
    whole = build("llava")
    whole.model.multi_modal_projector.act = ChangedActivation(UNMAPPABLE[change])
    model = CausalModel(whole, CONFIG)
    assert layers_of(model, MappingType.CONNECTOR) == [f"{PROJECTOR}.linear_1"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(1),
        lambda x: x.reshape(-1, x.shape[-1]),
        lambda x: x[:, :1],
        lambda x: torch.cat([x, x], 1),
        lambda x: x.reshape(-1, 2, x.shape[-1]),
    ],
)
def test_order_and_number_of_rows_within_an_image_do_not_matter(change: Any) -> None:
    whole = build("llava")
    whole.model.multi_modal_projector.act = ChangedActivation(change)
    model = CausalModel(whole, CONFIG)
    assert layers_of(model, MappingType.CONNECTOR) == [f"{PROJECTOR}.linear_1", LAST]


def test_a_layer_whose_weight_is_read_directly_stays_unwrapped() -> None:
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**TEXT, **KINDS["gemma3"][0]},
        vision_config={"model_type": "siglip_vision_model", **VISION},
        **KINDS["gemma3"][2],
    )
    model = CausalModel(type(build("gemma3"))(config), CONFIG)
    heads = [name for name in model.layers if ".head." in name]
    assert [name.rpartition("head.")[2] for name in heads] == ["mlp.fc1", "mlp.fc2"]
    assert {model.parts[name] for name in heads} == {MappingType.CONNECTOR}


def test_targets_select_among_all_parts() -> None:
    narrow = {"enable_tower_connector_lora": True, "target_modules": ["linear_2", "q_proj"]}
    model = CausalModel(build("llava"), LoRAConfig(**narrow))
    assert layers_of(model, MappingType.CONNECTOR) == [LAST]
    for part in (MappingType.TOWER, MappingType.LANGUAGE):
        assert {name.rpartition(".")[2] for name in layers_of(model, part)} == {"qkv_proj"}
    alone = CausalModel(build("llava"), LoRAConfig(target_modules=["q_proj"]))
    assert {name.rpartition(".")[2] for name in alone.layers} == {"qkv_proj"}
    assert set(alone.parts.values()) == {MappingType.LANGUAGE}


class UnknownArgument(LlavaForConditionalGeneration):
    """A model whose image method has an argument of its own."""

    def get_image_features(self, unknown: Tensor) -> Tensor:
        return unknown


class ImageByImage(LlavaForConditionalGeneration):
    """A model that runs its encoder once per image."""

    def get_image_features(self, pixel_values: Tensor, **named: Any) -> Any:
        return [
            super(ImageByImage, self).get_image_features(image[None], **named)
            for image in pixel_values
        ]


def with_unlike_rows() -> Any:
    """Return a model with Pixtral, whose rows per image depend on the image's own size."""
    vision = {"model_type": "pixtral", "head_dim": 8, **VISION}
    config = AutoConfig.for_model(
        "llava", text_config={**TEXT, **KINDS["llava"][0]}, vision_config=vision
    )
    return LlavaForConditionalGeneration(config)


REFUSED = {
    "rows by an image's own size": (with_unlike_rows, {}, "in no format that is supported"),
    "no known way": (
        lambda: UnknownArgument(build("llava").config),
        {},
        "in no format that is supported",
    ),
    "image by image": (lambda: ImageByImage(build("llava").config), {}, "expected one call with"),
    "targets that can't": (
        lambda: build("llava"),
        {"target_modules": ["position_embedding"]},
        "do not receive each image's rows",
    ),
    "targets of towers alone": (
        lambda: build("llava"),
        {"target_modules": ["linear_1"], "enable_tower_connector_lora": False},
        "linear_1.*set enable_tower_connector_lora",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_or_targets_that_can_not_be_served_are_refused_at_start(case: str) -> None:
    make, fields, message = REFUSED[case]
    with pytest.raises(ModelRefused, match=message):
        CausalModel(make(), LoRAConfig(**{"enable_tower_connector_lora": True, **fields}))


@pytest.mark.parametrize("config", [CONFIG, LoRAConfig()], ids=["with towers", "without"])
def test_packed_layers_are_freed(config: LoRAConfig) -> None:
    """The packed layer holds their weights, so keeping the layers would double the memory."""
    whole = build("llava")
    parts = {"language": whole.model.language_model, "tower": whole.model.vision_tower}
    children = {
        name: weakref.ref(layer)
        for name, part in parts.items()
        for path, layer in part.named_modules()
        if path.endswith("layers.0.self_attn.q_proj")
    }
    assert children.keys() == parts.keys()
    del parts
    model = CausalModel(whole, config)
    gc.collect()
    assert children["language"]() is None
    assert (children["tower"]() is None) == config.enable_tower_connector_lora
    assert model.layers
