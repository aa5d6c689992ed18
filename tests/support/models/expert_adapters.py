"""Adapters of the families with experts, as PEFT saves them and per expert as older tools do.

Each has a reference model. That is PEFT's own wherever PEFT can read the files, also where it
converts older ones.
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.models.expert_examples import EXPERTS, HIDDEN, INTER, family_configs
from tests.support.models.peft_adapters import save_adapter

Fields = dict[str, object]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def make_model(family: str, **changes: int) -> PreTrainedModel:
    """Return the family's tiny model, with fixed random weights; `changes` to its config."""
    torch.manual_seed(23)
    config = family_configs()[family]
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def fused_adapters(family: str, rank_min: int) -> dict[str, Fields]:
    """Return config fields: one parameter, the other, and both with attention and router."""
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    patterns = {"rank_pattern": {".*gate_up_proj": 2}, "alpha_pattern": {".*down_proj": 12}}
    return {
        "all": {
            "target_modules": ["o_proj"],
            "target_parameters": [router, DOWN, GATE_UP],
            **patterns,
        },
        "down": {"target_modules": [], "target_parameters": [DOWN], "r": rank_min},
        "gate_up": {"target_modules": [], "target_parameters": [GATE_UP], "use_rslora": True},
    }


def save_fused(family: str, root: Path, rank_min: int = 1) -> dict[str, PeftModel]:
    """Save `fused_adapters` below `root`; return PEFT's models of them."""
    configs = fused_adapters(family, rank_min)
    return {name: _save(family, root / name, fields) for name, fields in configs.items()}


def _save(family: str, directory: Path, fields: Fields) -> PeftModel:
    fields = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | fields
    return save_adapter(make_model(family), directory, len(directory.name), **fields)


_PROJECTIONS = ("model.layers.{}.mlp.experts.{}.{}", ("gate_proj", "up_proj", "down_proj"))
PER_EXPERT = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}.{}", ("w1", "w3", "w2")),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"), _PROJECTIONS
    ),
}
"""Module paths in per-expert files, with the names of gate, up and down."""
NOT_CONVERTED = ("qwen2_moe",)
"""Families whose per-expert files PEFT does not convert, so that it finds no tensors in them."""
ALPHA = 6


def per_expert(family: str, rank: int = 3) -> dict[str, Tensor]:
    """Return an A and a B for every projection of every expert."""
    path, projections = PER_EXPERT[family]
    torch.manual_seed(41)
    tensors: dict[str, Tensor] = {}
    # DeepSeek's first layer is dense.
    layers = range(family.startswith("deepseek"), 2)
    for layer, expert, projection in product(layers, range(EXPERTS), projections):
        module = path.format(layer, expert, projection)
        tensors |= pair_for(module, is_down=projection == projections[2], rank=rank)
    return tensors


def save_per_expert(family: str, directory: Path, rank: int = 3) -> PreTrainedModel | PeftModel:
    """Save a per-expert adapter; return PEFT's model of it, or a model with its deltas added."""
    fields = {"target_modules": list(PER_EXPERT[family][1]), "r": rank}
    tensors = per_expert(family, rank)
    write(directory, tensors, fields)
    if family in NOT_CONVERTED:
        return _merged(family, tensors, ALPHA / rank)
    return PeftModel.from_pretrained(make_model(family), directory).eval()


def _merged(family: str, tensors: Mapping[str, Tensor], scaling: float) -> PreTrainedModel:
    """Return the family's model with every expert's B @ A added to its weights."""
    model, (path, projections) = make_model(family), PER_EXPERT[family]
    for layer, expert, index in product(range(2), range(EXPERTS), range(3)):
        name = f"base_model.model.{path.format(layer, expert, projections[index])}"
        delta = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        experts = model.model.layers[layer].mlp.experts
        gate, up = experts.gate_up_proj.data[expert].chunk(2)
        (gate, up, experts.down_proj.data[expert])[index].add_(delta, alpha=scaling)
    return model


def pair_for(module: str, is_down: bool, rank: int) -> dict[str, Tensor]:
    """Return a random A and B for one expert's projection."""
    inner, outer = (INTER, HIDDEN) if is_down else (HIDDEN, INTER)
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": torch.randn(rank, inner) / inner**0.5,
        f"{name}.lora_B.weight": torch.randn(outer, rank) / rank**0.5,
    }


def fused_tensors(
    path: str, in_features: int, out_features: int, rank: int = 2
) -> dict[str, Tensor]:
    """Random A and B of all experts of a parameter, as PEFT saves them."""
    return {
        f"base_model.model.{path}.lora_A.weight": torch.randn(EXPERTS * rank, in_features),
        f"base_model.model.{path}.lora_B.weight": torch.randn(out_features, rank * EXPERTS),
    }


def write(directory: Path, tensors: Mapping[str, Tensor], fields: Mapping[str, object]) -> None:
    """Write an adapter directory with these tensors and config fields."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "lora_alpha": ALPHA,
        "r": 4,
        "target_modules": [],
        **fields,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
