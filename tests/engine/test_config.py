"""Properties of the configuration: wrong values are refused with the allowed ones."""

from collections.abc import Collection
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from loradock.engine.config import (
    LORA_SWITCHES,
    AdapterBounds,
    EngineConfig,
    LoRAConfig,
)
from loradock.messages.engine_options import LORA_RANKS


def test_defaults() -> None:
    config = LoRAConfig()
    assert (config.max_lora_rank, config.max_loras, config.max_cpu_loras) == (16, 1, 1)
    assert (config.lora_dtype, config.target_modules) == ("auto", None)
    assert LoRAConfig(max_loras=3).max_cpu_loras == 3
    assert LoRAConfig(max_loras=3, max_cpu_loras=5).max_cpu_loras == 5


@pytest.mark.parametrize("rank", LORA_RANKS)
def test_every_rank_of_the_list_is_allowed(rank: int) -> None:
    assert LoRAConfig(max_lora_rank=rank).max_lora_rank == rank


WRONG: list[dict[str, Any]] = [
    *({"max_lora_rank": rank} for rank in (0, -1, 2, 17, 513, 16.0, "16", True, None)),
    *({"max_loras": loras} for loras in (0, -1, 1.0, True, None)),
    *({"max_loras": 4, "max_cpu_loras": loras} for loras in (0, 3, -4, 4.0, True)),
    *({"lora_dtype": dtype} for dtype in ("float64", "half", "", torch.float64, torch.int8)),
    *({"target_modules": names} for names in ("q_proj", [], [""], [1])),
    *({"default_mm_loras": paths} for paths in ("a", ["a"], {"image": ""}, {"": "a"}, {"x": 1})),
    *({name: value} for name in LORA_SWITCHES for value in (1, "yes")),
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_wrong_value_is_refused_with_its_field(fields: dict[str, Any]) -> None:
    name, value = list(fields.items())[-1]
    with pytest.raises(ValueError, match=name) as caught:
        LoRAConfig(**fields)
    assert repr(value) in str(caught.value) or value == []


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_auto_is_the_dtype_of_the_base_model(name: str) -> None:
    dtype = getattr(torch, name)
    base = LlamaConfig(dtype=name)
    auto = LoRAConfig()
    resolved = auto.resolved_for(base)
    assert resolved.dtype == resolved.lora_dtype == dtype
    assert resolved.resolved_for(LlamaConfig(dtype="float64")) == resolved
    assert LoRAConfig(lora_dtype="float16").verify_with_model_config(base).dtype == torch.float16
    assert LoRAConfig(lora_dtype=dtype).dtype == dtype
    assert LoRAConfig(lora_dtype=name).dtype == dtype
    with pytest.raises(ValueError, match="auto"):
        _ = auto.dtype
    assert auto.verify_with_model_config(base) is auto
    assert auto == resolved


@pytest.mark.parametrize("dtype", ["float64", "int8", None])
def test_auto_refuses_a_base_model_of_another_dtype(dtype: str | None) -> None:
    with pytest.raises(ValueError, match="set lora_dtype to one of these"):
        LoRAConfig().verify_with_model_config(LlamaConfig(dtype=dtype))


BASE = LoRAConfig(
    max_loras=2,
    max_cpu_loras=4,
    target_modules=["q_proj", "v_proj"],
    default_mm_loras={"image": "a"},
)
CHANGES: dict[str, list[Any]] = {
    "max_lora_rank": [8, 512],
    "max_loras": [1, 3],
    "max_cpu_loras": [2, 9],
    "lora_dtype": ["float16", torch.bfloat16, "float32"],
    "fully_sharded_loras": [True],
    "target_modules": [["q_proj"], ["q_proj", "k_proj"], None],
    "default_mm_loras": [{}, {"image": "b"}, None],
    "enable_tower_connector_lora": [True],
    "specialize_active_lora": [True],
    "dual_stream": [True],
    "batch_invariant": [True],
    "enable_mixed_moe_lora_format": [True],
}
WITHOUT_EFFECT_ON_RESULTS = {"max_cpu_loras", "default_mm_loras"}


@pytest.mark.parametrize("name", LoRAConfig.__dataclass_fields__)
def test_the_hash_depends_on_what_changes_buffers_or_results(name: str) -> None:
    changed = [replace(BASE, **{name: value}) for value in CHANGES[name]]
    assert all(config != BASE for config in changed)
    hashes = {config.compute_hash() for config in [BASE, *changed]}
    assert len(hashes) == (1 if name in WITHOUT_EFFECT_ON_RESULTS else len(changed) + 1)


def test_equal_configurations_have_equal_hashes() -> None:
    named, typed = LoRAConfig(lora_dtype="float16"), LoRAConfig(lora_dtype=torch.float16)
    assert named.compute_hash() == typed.compute_hash()
    for modules in (["v_proj", "q_proj"], ("q_proj", "v_proj", "q_proj")):
        assert replace(BASE, target_modules=modules).compute_hash() == BASE.compute_hash()
    # Must never change: a stored hash is compared with those of later releases.
    assert LoRAConfig().compute_hash() == (
        "b23f217698778e896011bbaadd7ab04ed0d524423f16d633991e94f29aee4be3"
    )


def test_a_second_stream_needs_cuda_and_excludes_fully_sharded_adapters() -> None:
    config = LoRAConfig(dual_stream=True)
    config.verify_with_device(torch.device("cuda", 0))
    with pytest.raises(ValueError, match="dual_stream is True on device 'cpu'"):
        config.verify_with_device(torch.device("cpu"))
    LoRAConfig().verify_with_device(torch.device("cpu"))
    with pytest.warns(UserWarning, match="dual_stream is switched off"):
        both = LoRAConfig(dual_stream=True, fully_sharded_loras=True)
    assert (both.dual_stream, both.fully_sharded_loras) == (False, True)
    both.verify_with_device(torch.device("cpu"))


def test_arguments_are_copied() -> None:
    modules, paths = ["q_proj"], {"image": "a"}
    config = LoRAConfig(target_modules=modules, default_mm_loras=paths)
    modules.append("v_proj")
    paths["audio"] = "b"
    assert config == LoRAConfig(target_modules=["q_proj"], default_mm_loras={"image": "a"})
    assert hash(config) == hash(LoRAConfig(target_modules=["q_proj"], default_mm_loras={}))
    with pytest.raises(TypeError):
        config.default_mm_loras["audio"] = "b"  # type: ignore[index]


@pytest.mark.parametrize(
    ("modalities", "path"),
    [
        ((), None),
        (("text",), None),
        (("image",), "a"),
        (("image", "image", "text"), "a"),
        ({"audio", "video"}, "b"),
        (("image", "audio"), None),
    ],
)
def test_a_single_modality_selects_its_default_adapter(
    modalities: Collection[str], path: str | None
) -> None:
    config = LoRAConfig(default_mm_loras={"image": "a", "audio": "b"})
    assert config.default_mm_lora(modalities) == path
    assert LoRAConfig().default_mm_lora(modalities) is None


@pytest.mark.parametrize("name", LoRAConfig.__dataclass_fields__)
def test_the_configuration_is_frozen(name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(LoRAConfig(), name, None)


ENGINE_WRONG: list[dict[str, Any]] = [
    *({name: 0} for name in ("device_bytes_max", "file_threads", "max_num_seqs")),
    {"queue_requests_max": -1},
    {"max_model_len": -1},
    {"file_threads": 1.5},
    {"adapter_roots": "/adapters"},
    {"allow_pickled_weights": 1},
]


@pytest.mark.parametrize("fields", ENGINE_WRONG, ids=str)
def test_a_wrong_engine_value_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        EngineConfig(Path("model"), **fields)


def test_an_engine_config_converts_paths_and_device() -> None:
    config = EngineConfig("model", adapter_roots=["a", Path("b")], device="cpu")  # type: ignore[arg-type]
    assert config.model_directory == Path("model")
    assert config.adapter_roots == (Path("a"), Path("b"))
    assert config.torch_device == torch.device("cpu")
    assert not config.pins
    assert EngineConfig(Path("m")).torch_device.type == (
        "cuda" if torch.cuda.is_available() else "cpu"
    )


def test_page_locking_without_cuda_is_refused() -> None:
    if torch.cuda.is_available():
        assert EngineConfig(Path("m"), device="cpu", pin_memory=True).pins
    else:
        with pytest.raises(ValueError, match="pin_memory"):
            EngineConfig(Path("m"), pin_memory=True)


def test_bounds_are_positive() -> None:
    for name in AdapterBounds.__dataclass_fields__:
        with pytest.raises(ValueError, match=name):
            AdapterBounds(**{name: 0})


def test_fields_have_the_documented_order_and_none_is_auto() -> None:
    assert LoRAConfig(8, 2, True, 4, None, ["q_proj"]) == LoRAConfig(
        max_lora_rank=8,
        max_loras=2,
        fully_sharded_loras=True,
        max_cpu_loras=4,
        lora_dtype="auto",
        target_modules=["q_proj"],
    )
    assert LoRAConfig(lora_dtype=None).compute_hash() == LoRAConfig().compute_hash()


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("true", True), ("0", False)])
def test_the_environment_is_the_default_of_a_second_stream(
    value: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LORA_ENABLE_DUAL_STREAM", value)
    assert LoRAConfig().dual_stream is False or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LoRAConfig().dual_stream is is_on
    assert LoRAConfig(dual_stream=not is_on).dual_stream is not is_on


def test_default_adapters_have_ids_by_the_alphabetical_order_of_their_modalities() -> None:
    config = LoRAConfig(default_mm_loras={"video": "v", "audio": "a", "image": "i"})
    assert config.default_mm_lora_ids == {"audio": 1, "image": 2, "video": 3}
    assert LoRAConfig().default_mm_lora_ids == {}
