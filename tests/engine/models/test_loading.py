"""Loading of saved models: required files, and options that a model does not support."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedModel

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.models import saved_settings
from loradock.engine.models.loading import load_model
from tests.support.engine.engine_examples import tiny_config
from tests.support.models.expert_adapters import make_model

pytest_plugins = ("tests.support.engine.engine_fixtures",)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config())


def test_a_directory_without_a_safe_model_is_refused(
    tmp_path: Path, engine_config: EngineConfig
) -> None:
    def load() -> None:
        load_model(replace(engine_config, model_directory=tmp_path), LoRAConfig())

    with pytest.raises(ModelRefused, match=r"config\.json"):
        load()
    tiny_config().save_pretrained(tmp_path)
    # Pickled weights are not read, even if they are sound.
    torch.save(tiny_model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors"):
        load()
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}'
    )
    with pytest.raises(ModelRefused):
        load()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelRefused):
        load()


def test_a_device_with_an_index_becomes_the_threads_current_one(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    current_devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current_devices.append)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, _device: model)
    for device in ("cuda:1", "cpu"):
        load_model(replace(engine_config, device=device), LoRAConfig())
    assert current_devices == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("task", "lost", "refused"),
    [
        ("generate", "model.layers.1.mlp.up_proj.weight", True),
        ("generate", "lm_head.weight", True),
        ("embed", "model.layers.1.mlp.up_proj.weight", True),
        ("embed", "lm_head.weight", False),
        ("classify", "model.norm.weight", True),
        ("classify", "lm_head.weight", False),
    ],
)
def test_missing_weights_are_refused_unless_the_task_needs_none(
    task: str, lost: str, refused: bool, tmp_path: Path, engine_config: EngineConfig
) -> None:
    model = LlamaForCausalLM(tiny_config())
    model.save_pretrained(tmp_path)
    saved = {name: tensor for name, tensor in model.state_dict().items() if name != lost}
    assert len(saved) + 1 == len(model.state_dict())
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    config = replace(engine_config, model_directory=tmp_path, task=task)
    if not refused:
        # A head that was not saved must come with the adapters.
        assert load_model(config, LoRAConfig()).without_head is (task == "classify")
        return
    with pytest.raises(ModelRefused, match=f"no weights for 1 tensors .* {task}: .*weight"):
        load_model(config, LoRAConfig())


def test_a_model_without_a_tokenizer_accepts_token_ids(
    tmp_path: Path, engine_config: EngineConfig
) -> None:
    tiny_model().save_pretrained(tmp_path)
    model = load_model(replace(engine_config, model_directory=tmp_path), LoRAConfig())
    assert model.tokenizer is None


@pytest.mark.parametrize(
    ("saved", "requested", "is_fast", "loaded"),
    [
        ("bfloat16", "auto", True, "bfloat16"),
        ("bfloat16", "auto", False, "float32"),
        ("bfloat16", "float32", True, "float32"),
        ("float32", "float16", False, "float16"),
    ],
)
def test_a_model_is_loaded_in_the_requested_dtype_and_by_auto_in_a_fast_one(  # noqa: PLR0913, PLR0917
    saved: str,
    requested: str,
    is_fast: bool,
    loaded: str,
    tmp_path: Path,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saved_settings, "has_fast_products", lambda _: is_fast)
    tiny_model().to(getattr(torch, saved)).save_pretrained(tmp_path)
    config = replace(engine_config, model_directory=tmp_path, dtype=requested)
    assert load_model(config, LoRAConfig()).dtype == getattr(torch, loaded)


EXPERT_PARALLEL = {"expert_parallel": True}


def test_expert_parallel_requires_a_model_with_experts(
    tmp_path: Path, engine_config: EngineConfig
) -> None:
    with pytest.raises(ModelRefused, match="is on, and the model has no experts"):
        load_model(replace(engine_config, **EXPERT_PARALLEL), LoRAConfig())
    make_model("mixtral").save_pretrained(tmp_path)
    config = replace(engine_config, model_directory=tmp_path, **EXPERT_PARALLEL)
    assert load_model(config, LoRAConfig()).layers


@pytest.mark.parametrize("field", ["enable_mixed_moe_lora_format", "enable_tower_connector_lora"])
def test_a_setting_for_a_part_that_the_model_lacks_is_ignored_with_a_warning(
    field: str, engine_config: EngineConfig
) -> None:
    with pytest.warns(UserWarning, match=f"{field} is set.*ignored"):
        model = load_model(engine_config, LoRAConfig(**{field: True}))
    assert model.layers.keys() == load_model(engine_config, LoRAConfig()).layers.keys()
