"""Fields of tiny configurations, for every causal architecture.

`COMMON` has the names that most configurations use. `FIELDS` has what a type needs in addition, so
that a tiny instance has a layer of each kind: attention and a recurrent state, a dense MLP and
experts, a window shorter than the prompts.
"""

from collections.abc import Mapping
from typing import Any, Final

from tests.support.models.common_fields import COMMON, POSITIONS, VOCABULARY, Fields

LATENT: Final[Fields] = {"head_dim": 4, "num_key_value_heads": 4}
"""Latent attention, where `head_dim` is that of the rotated part."""

HYBRID: Final[Fields] = {"layer_types": ["linear_attention", "full_attention"]}

MAMBA_HYBRID: Final[Fields] = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}

VISION: Final[Fields] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "output_dim": 16,
}
"""A vision tower that no text reaches."""

AUDIO: Final[Fields] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_blocks": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
}

GEMMA3N: Final[Fields] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [48] * 4,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}

CODEBOOKS: Final = 2

CODES: Final[Fields] = {"num_codebooks": CODEBOOKS, "audio_channels": 1}
"""A decoder of audio codes, whose rows have several of them at each step."""

INKLING: Final[dict[str, Any]] = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 6,
    "d_rel": 4,
    "rel_extent": 16,
}

INKLING2: Final[Fields] = INKLING | {
    "unpadded_vocab_size": VOCABULARY,
    "n_layers_per_attn_res_block": 1,
}

SLIDING: Final[Fields] = {"layer_types": ["sliding_attention", "full_attention"]}

ASSISTANT: Final[Fields] = {
    "text_config": {
        **SLIDING,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    },
    "backbone_hidden_size": 16,
}

FIELDS: Final[Mapping[str, Fields]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {**LATENT, **HYBRID, "num_mtp_layers": 0},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "patcher_config": {**COMMON, "num_key_value_heads": 4},
        "encoder_config": {**COMMON, "hidden_size_global": 32, "num_key_value_heads": 4},
        "decoder_config": {**COMMON, "hidden_size_global": 32, "num_key_value_heads": 4},
        "global_config": {**COMMON, "num_key_value_heads": 4},
        # Its own `generate` makes caches for the encoder's and the decoder's layers from these.
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 32,
    },
    "cohere_compass_text": {
        **SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cohere2": SLIDING,
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": POSITIONS},
    "dbrx": {
        "max_seq_len": POSITIONS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 2,
            "heavily_compressed_attention": 4,
        },
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "o_groups": 2,
        "o_lora_rank": 4,
        "hc_mult": 2,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": LATENT,
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    "emu3": {"text_config": {}, "vq_config": {"base_channels": 32, "num_res_blocks": 1}},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fuyu": {"text_config": {"model_type": "persimmon"}},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 8},
    "gemma3": {"text_config": {**SLIDING, "query_pre_attn_scalar": 8}, "vision_config": VISION},
    "gemma3n_text": GEMMA3N,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4_text": SLIDING,
    "gemma4": {"text_config": SLIDING, "vision_config": VISION, "audio_config": None},
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": {
        **ASSISTANT,
        "text_config": {**ASSISTANT["text_config"], "model_type": "gemma4_unified_text"},
    },
    "gemma4_unified_text": SLIDING,
    "gemma4_unified": {"text_config": SLIDING, "vision_config": VISION, "audio_config": None},
    "git": {"vision_config": VISION},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "got_ocr2": {"vision_config": VISION, "text_config": {"model_type": "qwen2"}},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "window_size": 6,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
    },
    "hy_v4": LATENT,
    "inkling_text": INKLING,
    "inkling2_text": INKLING2,
    "inkling2_loop_text": {
        **INKLING2,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_gate_rank": 4,
    },
    "jamba": MAMBA_HYBRID,
    "kimi_linear": {
        **LATENT,
        **HYBRID,
        "q_lora_rank": None,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "num_hidden_layers": 2,
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
        "num_experts_per_tok": 1,
    },
    "llama4": {
        "text_config": {
            "attention_chunk_size": 6,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "num_experts_per_tok": 1,
        },
        "vision_config": {
            **VISION,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
        },
    },
    "longcat_flash": {**LATENT, "num_layers": 1, "ffn_hidden_size": 48, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "minicpm3": LATENT,
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 4,
        "sliding_window": None,
    },
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            **VISION,
            "num_global_layers": 1,
            "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
            "attention_heads": 2,
            "supported_aspect_ratios": [[1, 1]],
        },
    },
    "moshi": {"sliding_window": POSITIONS},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}, "audio_config": AUDIO},
    "mpt": {"max_seq_len": POSITIONS},
    "musicgen": CODES,
    "musicgen_melody": CODES,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "num_hidden_layers": None,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 16,
        "sliding_window": None,
    },
    "olmo_hybrid": HYBRID,
    "phi4_multimodal": {
        "sliding_window": None,
        "original_max_position_embeddings": POSITIONS,
        "vision_config": {**VISION, "crop_size": 16, "num_hidden_layers": 2},
        "audio_config": {
            **AUDIO,
            "num_blocks": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "prophetnet": {
        "num_hidden_layers": None,
        # As many as decoder layers: caches have a layer for each of the encoder's.
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_buckets": 8,
        "relative_max_distance": 16,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "is_encoder_decoder": False,
        "add_cross_attention": False,
    },
    "qwen3_next": HYBRID,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 4,
    },
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5": {"text_config": HYBRID, "vision_config": {**VISION, "out_hidden_size": 32}},
    "qwen3_5_moe": {"text_config": HYBRID, "vision_config": {**VISION, "out_hidden_size": 32}},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "attention_window_size": 6,
    },
    "reformer": {
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": (8, 8),
        "axial_pos_embds_dim": (16, 16),
        "feed_forward_size": 48,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 64,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "roc_bert": {"shape_vocab_size": 20, "pronunciation_vocab_size": 20},
    "youtu": LATENT,
    "xglm": {"attention_heads": 4},
    "xlm": {"emb_dim": 32, "causal": True, "pad_token_id": 2, "pad_index": 2},
    "xlnet": {"max_position_embeddings": None, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "xlstm": {
        # The sizes of keys and values are rounded up to multiples of 64.
        "hidden_size": 64,
        "head_dim": None,
        "v_head_dim": None,
        "num_heads": 4,
        "qk_dim_factor": 1.0,
        "chunk_size": 4,
        "ffn_round_up_to_multiple_of": 8,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "num_key_value_heads": 4,
        "chunk_size": 4,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "adapter_rank": 4,
    },
    "zaya": {"router_hidden_size": 8, "num_experts_per_tok": 1},
}
"""The fields of single types; None removes a common one."""
