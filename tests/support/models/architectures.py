"""The architectures that are compared with PEFT: one tiny random model per row.

The parity tests run this table, and SUPPORTED.md is generated from it. It restricts nothing: any
model that passes the probe is served. `make parity` compares every architecture that can be built.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY: Final = 97
CONTEXT_TOKENS_MAX: Final = 64

COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS_MAX,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
"""Fields with the names that most configurations use; each configuration uses those it knows."""


MLA: Final[Mapping[str, Any]] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "first_k_dense_replace": 2,
}
"""The widths of latent attention."""


@dataclass(frozen=True)
class Architecture:
    """One `transformers` model type.

    `fields`: its own, in addition to the common ones (None removes one). `padded`: a part of the
    reason if the model can't be run in flat passes, with some versions of the library if it is
    `padded_before` a newer one.
    """

    model_type: str
    title: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    padded: str = ""
    padded_before: str = ""

    def build(self, dtype: torch.dtype = torch.float32, layers: int = 2) -> PreTrainedModel:
        """Return a random instance, the same every time."""
        torch.manual_seed(1)
        fields = {"num_hidden_layers": layers, **COMMON, **self.fields}
        config = AutoConfig.for_model(
            self.model_type, **{name: value for name, value in fields.items() if value is not None}
        )
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


ARCHITECTURES: Final = (
    Architecture("llama", "Llama"),
    Architecture("mistral", "Mistral", {"sliding_window": 6}),
    Architecture("qwen2", "Qwen 2"),
    Architecture("qwen3", "Qwen 3"),
    Architecture("gemma", "Gemma"),
    Architecture("gemma2", "Gemma 2", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    Architecture("gemma3_text", "Gemma 3", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    Architecture("phi", "Phi 1 and 2"),
    Architecture("phi3", "Phi 3 and 4"),
    Architecture("gpt_neox", "GPT-NeoX, Pythia"),
    Architecture("gpt2", "GPT-2"),
    Architecture("gpt_bigcode", "GPT-BigCode, StarCoder"),
    Architecture(
        "gpt_neo",
        "GPT-Neo",
        {
            "attention_types": [[["global", "local"], 1]],
            "num_hidden_layers": 2,
            "num_heads": 4,
            "window_size": 6,
        },
        padded="SequenceMasks",
    ),
    Architecture("gptj", "GPT-J", {"rotary_dim": 4}, "SequenceMasks", padded_before="5.24"),
    Architecture("codegen", "CodeGen", {"rotary_dim": 4}, "SequenceMasks", padded_before="5.24"),
    Architecture("falcon", "Falcon", {"head_dim": None}, padded="SequenceMasks"),
    Architecture("opt", "OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Architecture("bloom", "BLOOM", padded="no positions"),
    Architecture(
        "mpt", "MPT", {"d_model": 32, "n_heads": 4, "max_seq_len": 64}, padded="no positions"
    ),
    Architecture("stablelm", "StableLM"),
    Architecture("cohere", "Cohere Command R"),
    Architecture("cohere2", "Cohere Command R7B", {"sliding_window": 6}),
    Architecture("olmo2", "OLMo 2"),
    Architecture("olmo3", "OLMo 3", {"sliding_window": 6}),
    Architecture("granite", "Granite"),
    Architecture("starcoder2", "StarCoder 2"),
    Architecture("glm", "GLM"),
    Architecture("glm4", "GLM 4"),
    Architecture("nemotron", "Nemotron"),
    Architecture("smollm3", "SmolLM 3"),
    Architecture("exaone4", "EXAONE 4", {"sliding_window": 6}),
    Architecture("seed_oss", "Seed-OSS"),
    Architecture("arcee", "Arcee"),
    Architecture("helium", "Helium"),
    Architecture("persimmon", "Persimmon"),
    Architecture("biogpt", "BioGPT"),
    Architecture(
        "xglm", "XGLM", {"d_model": 32, "attention_heads": 4, "ffn_dim": 48}, padded="SequenceMasks"
    ),
    Architecture("ernie4_5", "ERNIE 4.5"),
    Architecture("apertus", "Apertus"),
    Architecture("hunyuan_v1_dense", "Hunyuan dense"),
    Architecture("minicpm3", "MiniCPM 3", MLA, padded="KeyError"),
    Architecture("nanochat", "nanochat"),
    Architecture("diffllama", "DiffLlama", padded="differs from the model's own"),
    Architecture("internlm3", "InternLM 3"),
    Architecture("doge", "Doge", padded="SequenceMasks"),
    Architecture("modernbert-decoder", "ModernBERT decoder"),
    Architecture("vaultgemma", "VaultGemma"),
)
