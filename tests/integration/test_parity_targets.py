"""What a config names and its file lacks: adapters that PEFT saved are served as PEFT serves them.

Names of fused experts and names that only other layers have are no reason for a refusal. Layers
whose tensors were lost are named in a warning.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.models.causal_configs import build_model
from tests.support.models.expert_adapters import DOWN, GATE_UP, make_model
from tests.support.models.peft_adapters import save_adapter

torch.set_num_threads(1)
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
PROMPT = torch.tensor([[5, 1, 44, 3, 9]])
HYBRIDS = {
    "qwen3_next": ["q_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj"],
    "lfm2": ["q_proj", "v_proj", "in_proj", "out_proj"],
}


def save(model: PreTrainedModel, directory: Path, **fields: Any) -> PeftModel:
    return save_adapter(model, directory, 7, r=2, lora_alpha=6, task_type="CAUSAL_LM", **fields)


def manager_of(model: PreTrainedModel) -> LRUCacheLoRAModelManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=2)
    vocabulary = model.config.get_text_config().vocab_size
    return LRUCacheLoRAModelManager(model, 4, 64, vocabulary, config, "cpu", checked=True)


def load(manager: LRUCacheLoRAModelManager, path: Path) -> list[str]:
    """Load an adapter as number 1 and use it for all rows; return the warnings in the log."""
    with capture_logs() as lines:
        assert LRUCacheWorkerLoRAManager(manager).add_adapter(LoRARequest("a", 1, str(path)))
    manager.set_adapter_mapping(LoRAMapping([1] * PROMPT.numel(), [1], is_prefill=True))
    return warnings_in(lines)


def warnings_in(lines: list[Any]) -> list[str]:
    return [text for line in lines for text in line.get("warnings", ())]


@torch.no_grad()
def check_logits(manager: LRUCacheLoRAModelManager, reference: PeftModel) -> None:
    found, expected = (model(input_ids=PROMPT).logits for model in (manager.model, reference))
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("parameters", [[GATE_UP, DOWN], None], ids=["experts", "without experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_experts_are_no_layers_where_experts_are_fused(
    family: str, parameters: list[str] | None, tmp_path: Path
) -> None:
    fields = {"target_modules": NAMES, "target_parameters": parameters}
    reference = save(make_model(family), tmp_path, **fields)
    manager = manager_of(make_model(family))
    warnings = load(manager, tmp_path)
    check_logits(manager, reference)
    has_experts = any(".experts." in name for name in saved(tmp_path))
    assert bool(warnings) != has_experts, "experts that stay as in the base model are named"
    assert all("mlp.experts.gate_proj" in text for text in warnings)


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("pattern", [None, "layers", ["blocks", "layers"]])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_layers_of_one_kind_are_chosen_of_a_hybrid(
    model_type: str, layer: int, pattern: str | list[str] | None, tmp_path: Path
) -> None:
    reference = save(
        build_model(model_type),
        tmp_path,
        target_modules=HYBRIDS[model_type],
        layers_to_transform=[layer],
        layers_pattern=pattern,
    )
    assert all(f".layers.{layer}." in name for name in saved(tmp_path))
    manager = manager_of(build_model(model_type))
    assert not load(manager, tmp_path)
    check_logits(manager, reference)


def lose(directory: Path, is_lost: Callable[[str], bool]) -> None:
    """Save an adapter's file without some of its tensors."""
    kept = {name: tensor for name, tensor in saved(directory).items() if not is_lost(name)}
    save_file(kept, directory / "adapter_model.safetensors")


@pytest.mark.parametrize("way", ["files", "tensors", "tensors with the model"])
def test_layers_whose_tensors_were_lost_are_named_and_stay_as_in_the_base_model(
    way: str, tmp_path: Path
) -> None:
    save(make_model("mixtral"), tmp_path, target_modules=["q_proj", "k_proj", "o_proj"])
    lose(tmp_path, lambda name: ".layers.1." in name and "k_proj" not in name)
    with pytest.warns(UserWarning, match="missing adapter keys"):
        reference = PeftModel.from_pretrained(make_model("mixtral"), tmp_path).eval()
    manager = manager_of(make_model("mixtral"))
    if way == "files":
        warnings = load(manager, tmp_path)
    else:
        model = manager if way == "tensors with the model" else None
        helper = PEFTHelper.from_local_dir(str(tmp_path))
        with capture_logs() as lines:
            loaded = LoRAModel.from_lora_tensors(1, saved(tmp_path), helper, model=model)
            assert manager.add_adapter(loaded.clone(1))
        manager.activate_adapter(1)
        manager.set_adapter_mapping(LoRAMapping([1] * PROMPT.numel(), [1], is_prefill=True))
        warnings = warnings_in(lines)
    assert warnings == [
        "no tensors for self_attn.o_proj, self_attn.q_proj of model.layers.1, although the config "
        "names them; of 6 targets, 2 stay as in the base model"
    ]
    check_logits(manager, reference)


@pytest.mark.parametrize("parameters", [[GATE_UP], [GATE_UP, DOWN]])
def test_fused_experts_whose_tensors_were_lost_are_named(
    parameters: list[str], tmp_path: Path
) -> None:
    fields = {"target_modules": ["q_proj"], "target_parameters": parameters}
    save(make_model("qwen3_moe"), tmp_path, **fields)
    lose(tmp_path, lambda name: ".layers.1.mlp." in name)
    (warning,) = load(manager_of(make_model("qwen3_moe")), tmp_path)
    assert "mlp.experts.gate_up_proj" in warning
    assert " of model.layers.1, " in warning
    lose(tmp_path, lambda name: ".mlp." in name)
    with pytest.raises(AdapterDoesNotFit, match="no tensor is for it"):
        load(manager_of(make_model("qwen3_moe")), tmp_path)
