"""Adapters added from memory: kinds of tensors, and adapters that are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from loradock.engine.adapters import LoRALayerWeights, LoRAModel, PackedLoRALayerWeights
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit, EngineError, NotFinite
from loradock.engine.manager import LoRAModelManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.manager_examples import (
    CLASSES,
    CONTENTS,
    MLP,
    check_rows,
    forward,
    full_manager,
    make_manager,
    manager_state,
    mapping_of,
)
from tests.support.models.expert_examples import family_configs

torch.set_num_threads(1)

Change = Callable[[LoRALayerWeights], LoRALayerWeights]


def changed(number: int, module: str, change: Change) -> LoRAModel:
    """Return content `number` as adapter 9, with one module's weights changed."""
    model = CONTENTS[number].model(9)
    model.loras[module] = change(model.loras[module])
    return model


def poked(letter: str, value: float) -> Change:
    def change(lora: LoRALayerWeights) -> LoRALayerWeights:
        getattr(lora, letter)[0, 0] = value
        return lora

    return change


def reshaped(**shapes: tuple[int, int]) -> Change:
    return lambda lora: replace(lora, **{name: torch.ones(shape) for name, shape in shapes.items()})


UP = MLP[1]


BAD: dict[str, tuple[Callable[[], LoRAModel], type[EngineError], str]] = {
    "NaN in A": (lambda: changed(0, UP, poked("lora_a", torch.nan)), NotFinite, "up_proj"),
    "infinity in B": (lambda: changed(0, UP, poked("lora_b", torch.inf)), NotFinite, "up_proj"),
    "beyond the dtype once scaled": (
        lambda: changed(0, UP, poked("lora_b", 2e38)),
        NotFinite,
        "too large",
    ),
    "too wide": (
        lambda: changed(0, UP, reshaped(lora_a=(4, 17))),
        AdapterDoesNotFit,
        "[4, 17]",
    ),
    "too low": (
        lambda: changed(0, UP, reshaped(lora_b=(23, 4))),
        AdapterDoesNotFit,
        "[24, 4]",
    ),
    "integers": (
        lambda: changed(0, UP, lambda lora: replace(lora, lora_a=lora.lora_a.int())),
        AdapterDoesNotFit,
        "int32",
    ),
    "a rank over the maximum": (
        lambda: LoRAModel(
            9, 9, {UP: LoRALayerWeights(UP, 9, 9, torch.ones(9, 16), torch.ones(24, 9))}
        ),
        AdapterDoesNotFit,
        "max_lora_rank",
    ),
    "an unknown module": (
        lambda: LoRAModel(
            9,
            1,
            {"up_proj": LoRALayerWeights("up_proj", 1, 1, torch.ones(1, 16), torch.ones(24, 1))},
        ),
        AdapterDoesNotFit,
        "up_proj",
    ),
    "tensors without numbers": (
        lambda: changed(0, UP, lambda lora: replace(lora, lora_a=lora.lora_a.to("meta"))),
        AdapterDoesNotFit,
        "meta",
    ),
    "a sparse tensor": (
        lambda: changed(0, UP, lambda lora: replace(lora, lora_b=lora.lora_b.to_sparse())),
        AdapterDoesNotFit,
        "sparse",
    ),
    "a scaling that is no number": (
        lambda: changed(0, UP, lambda lora: replace(lora, scaling=torch.nan)),
        NotFinite,
        "up_proj",
    ),
    "nothing but zeros by its alpha": (
        lambda: changed(0, UP, lambda lora: replace(lora, lora_alpha=0.0, scaling=0.0)),
        AdapterDoesNotFit,
        "alpha 0",
    ),
    "no module": (lambda: LoRAModel(9, 1, {}), AdapterDoesNotFit, "no module"),
}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_changes_nothing(cls: type[LoRAModelManager], name: str) -> None:
    """It is checked before another adapter is evicted for it."""
    make, error, word = BAD[name]
    manager = full_manager(cls)
    before = manager_state(manager)
    with pytest.raises(error, match="adapter 9") as caught:
        manager.add_adapter(make())
    assert word in str(caught.value)
    assert manager_state(manager) == before


def test_all_problems_are_reported_at_once() -> None:
    model = CONTENTS[0].model(9)
    model.loras[UP] = reshaped(lora_a=(4, 17))(model.loras[UP])
    model.loras["elsewhere"] = model.loras[MLP[0]]
    with pytest.raises(AdapterDoesNotFit, match=r"(?s)up_proj.*elsewhere"):
        full_manager(LoRAModelManager).add_adapter(model)


def test_tensors_may_be_changed_after_they_were_added() -> None:
    manager = make_manager(LoRAModelManager)
    model = CONTENTS[0].model(1)
    manager.add_adapter(model)
    for lora in model.loras.values():
        lora.lora_a.fill_(torch.nan)
        lora.lora_b.zero_()
    manager.activate_adapter(1)
    manager.set_adapter_mapping(mapping_of(1))
    check_rows(manager, {1: CONTENTS[0]}, 1)


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "with gradients": lambda t: t.clone().requires_grad_(),
    "the end of a computation": lambda t: t.clone().requires_grad_() * 1,
    "not contiguous": lambda t: t.T.contiguous().T,
    "a view of something larger": lambda t: torch.stack([t, t], 1)[:, 0],
    "expanded": lambda t: t[:, :1].expand(t.shape),
    "an nn.Parameter": torch.nn.Parameter,
    "made in inference mode": torch.inference_mode()(torch.clone),
    "float64": lambda t: t.double(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_any_kind_of_tensor_is_read_by_value(name: str) -> None:
    manager = make_manager(LoRAModelManager)
    given, plain = CONTENTS[0].model(1), CONTENTS[0].model(2)
    for module, lora in given.loras.items():
        a, b = TENSORS[name](lora.lora_a), TENSORS[name](lora.lora_b)
        given.loras[module] = replace(lora, lora_a=a, lora_b=b)
        values = {"lora_a": a.detach().float().clone(), "lora_b": b.detach().float().clone()}
        plain.loras[module] = replace(lora, **values)
    for model in (given, plain):
        manager.add_adapter(model)
        manager.activate_adapter(model.id)
    manager.set_adapter_mapping(mapping_of(1, 2, 0))
    found = forward(manager, 3)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    kept = manager.get_adapter(1)
    assert kept is not None
    assert not any(lora.lora_b.requires_grad for lora in kept.loras.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_adapters_are_widened(dtype: torch.dtype) -> None:
    manager = make_manager(LoRAModelManager)
    model = CONTENTS[0].model(1)
    for module, lora in model.loras.items():
        a, b = lora.lora_a.to(dtype), lora.lora_b.to(dtype)
        model.loras[module] = replace(lora, lora_a=a, lora_b=b)
    manager.add_adapter(model)
    kept = manager.get_adapter(1)
    assert kept is not None
    for module, lora in model.loras.items():
        assert torch.equal(kept.loras[module].lora_a, lora.lora_a.float())
        assert torch.equal(kept.loras[module].lora_b, lora.lora_b.float() * lora.scaling)


def test_a_value_that_overflows_the_arenas_dtype_is_refused() -> None:
    manager = make_manager(LoRAModelManager, lora_dtype="float16")
    with pytest.raises(NotFinite, match="float16"):
        manager.add_adapter(changed(0, UP, poked("lora_b", 60_000.0)))


@pytest.mark.parametrize("adapter_id", [True, 1.0, "1", None])
def test_an_id_is_an_integer(adapter_id: object) -> None:
    manager = full_manager(LoRAModelManager)
    before = manager_state(manager)
    model = CONTENTS[0].model(1)
    model.id = adapter_id
    with pytest.raises(ValueError, match="id must be an integer"):
        manager.add_adapter(model)
    assert manager_state(manager) == before


@torch.no_grad()
def test_packed_weights_are_those_of_their_modules() -> None:
    """Of a packed projection and of experts, as a program packs them before it adds them."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(family_configs()["mixtral"]).eval()
    config = LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=2)
    manager = LoRAModelManager(model, 8, 64, 64, config, "cpu", checked=True)
    loras = {}
    for path, shape in (
        *((f"model.layers.0.self_attn.{name}_proj", (32, 16)) for name in "kv"),
        *(
            (f"model.layers.1.mlp.experts.{expert}.{name}", widths)
            for expert in range(4)
            for name, widths in (("w1", (32, 24)), ("w2", (24, 32)), ("w3", (32, 24)))
        ),
    ):
        a, b = torch.randn(4, shape[0]), torch.randn(shape[1], 4)
        loras[path] = LoRALayerWeights(path, 4, 8.0, a, b)
    manager.add_adapter(LoRAModel(1, 4, loras))
    k, v, *experts = loras.values()
    qkv, moe = "model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.experts"
    packed = {
        qkv: PackedLoRALayerWeights.pack([None, k, v], qkv),
        moe: PackedLoRALayerWeights.pack_moe(experts, moe),
    }
    manager.add_adapter(LoRAModel(2, 4, packed))
    tokens, found = torch.arange(3, 9)[None], []
    for adapter_id in (0, 1, 2):
        if adapter_id:
            manager.activate_adapter(adapter_id)
        manager.set_adapter_mapping(LoRAMapping([adapter_id] * 6, [adapter_id], is_prefill=True))
        found.append(manager.model(tokens).logits)
    assert torch.equal(found[1], found[2])
    assert not torch.allclose(found[0], found[1])
