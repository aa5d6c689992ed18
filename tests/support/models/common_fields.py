"""The fields that tiny configurations of most causal architectures have in common."""

from collections.abc import Mapping
from typing import Any, Final

VOCABULARY: Final = 97
POSITIONS: Final = 64

Fields = Mapping[str, Any]

COMMON: Final[Fields] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "sliding_window": 6,
    # Mixtures of experts.
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # State spaces and linear attention.
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_dt_rank": 4,
    "state_size": 8,
    "time_step_rank": 4,
    "use_mamba_kernels": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
    # Latent attention and indexers.
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    # Other names of the same sizes.
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "ffn_dim": 48,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "is_decoder": True,
    "global_head_dim": 8,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
