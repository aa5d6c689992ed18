"""Tiny random experts modules of the served families, and a reference for one layer.

The reference runs the module's own forward with the adapters' deltas added to its weights.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import NamedTuple

from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LongcatFlashConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

EXPERTS, TOP_K, HIDDEN, INTER = 4, 2, 32, 24
IDENTITIES = 3
"""The experts of `longcat_flash` that return their input."""

_COMMON = {
    "vocab_size": 64,
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "intermediate_size": 40,
    "moe_intermediate_size": INTER,
    "first_k_dense_replace": 1,
}


def family_configs() -> dict[str, PreTrainedConfig]:
    """Return a tiny config of each family, by a short name."""
    qwen = {"num_experts": EXPERTS, "intermediate_size": 40, "moe_intermediate_size": INTER}
    return {
        "mixtral": MixtralConfig(**_COMMON, intermediate_size=INTER, num_local_experts=EXPERTS),
        "qwen2_moe": Qwen2MoeConfig(**_COMMON, **qwen, shared_expert_intermediate_size=20),
        "qwen3_moe": Qwen3MoeConfig(**_COMMON, **qwen, head_dim=8, norm_topk_prob=True),
        "olmoe": OlmoeConfig(**_COMMON, intermediate_size=INTER, num_experts=EXPERTS),
        "deepseek_v2": DeepseekV2Config(**{**_COMMON, **_LATENT}),
        "deepseek_v3": DeepseekV3Config(**{**_COMMON, **_LATENT}),
        "gpt_oss": GptOssConfig(
            **_COMMON, intermediate_size=INTER, num_local_experts=EXPERTS, head_dim=8
        ),
        "nemotron_h": NemotronHConfig(
            **_COMMON, n_routed_experts=EXPERTS, moe_intermediate_size=INTER
        ),
        "longcat_flash": LongcatFlashConfig(
            **{**_COMMON, **_LATENT, "expert_ffn_hidden_size": INTER, "zero_expert_num": IDENTITIES}
        ),
    }


SERVED_FAMILIES = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen 2 MoE",
    "qwen3_moe": "Qwen 3 MoE",
    "olmoe": "OLMoE",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3",
    "gpt_oss": "GPT-OSS",
}
"""Titles of the families whose whole models are compared with PEFT."""

SPLIT_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"),
)
"""Families that are split over ranks, and compared with PEFT on two of them."""

MODULES = {
    "mixtral": MixtralExperts,
    "deepseek_v3": DeepseekV3Experts,
    "gpt_oss": GptOssExperts,
    "nemotron_h": NemotronHExperts,
}
"""Modules of each layout: gate and up concatenated (twice), interleaved with biases, no gate."""


IDENTITY_MODULES = {"longcat_flash": LongcatFlashExperts}
"""Modules with experts that return their input."""


def make_experts(name: str, **changes: int) -> nn.Module:
    """Return a random experts module in eager mode; `changes` to its config."""
    config = family_configs()[name]
    config.update(changes)
    config._experts_implementation = "eager"
    module = (MODULES | IDENTITY_MODULES)[name](config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval().requires_grad_(False)


class Delta(NamedTuple):
    """One slot's A [experts, rank, in] and B [experts, out, rank] by slice name."""

    a: Tensor
    b: Tensor


PROJECTIONS = (
    ("gate_up_proj", "down_proj"),
    ("gate_proj", "down_proj", "up_proj"),
    ("up_proj", "down_proj"),
)
"""The orders in which `set_lora` takes projections: w13 and w2; w1, w2 and w3; w1 and w2."""


def projections_of(names: Iterable[str], is_fused: bool) -> tuple[str, ...]:
    """Return the projections of an adapter, fused or not, for a layer with these columns."""
    known = set(names)
    orders = [order for order in PROJECTIONS if set(order) <= known]
    return orders[0] if is_fused else next((one for one in orders if len(one) == 3), orders[0])


def add_to_weights(module: nn.Module, deltas: Mapping[str, Delta]) -> nn.Module:
    """Return a copy of the module with every delta added to its weights."""
    merged = deepcopy(module)
    for name, (a, b) in deltas.items():
        # Nothing reads the matrices of experts that return their input.
        _slice_weights(merged, name)[: len(a)].add_(b @ a)
    return merged


def _slice_weights(module: nn.Module, name: str) -> Tensor:
    """Return a slice's part of the module's weights: a view [experts, out, in]."""
    halves = {"gate_proj": 0, "up_proj": 1}
    fused = hasattr(module, "gate_up_proj")
    parameter = "gate_up_proj" if fused and name in halves else name
    weights = module.get_parameter(parameter)
    if getattr(module, "is_transposed", False):
        weights = weights.transpose(1, 2)
    if parameter == name:
        return weights
    inter = weights.shape[1] // 2
    if getattr(module, "is_concatenated", True):
        return weights[:, halves[name] * inter :][:, :inter]
    return weights[:, halves[name] :: 2]
