"""Tiny random image-text models, one per model type that is compared with PEFT.

Text parts are as small as those of `architectures`, so that a row costs no more.
"""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.support.models.architectures import COMMON

IMAGE_TOKEN = 90
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "embed_dim": 16,
    "hidden_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
}
QWEN_2_5_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
QWEN_TEXT = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
}
GEMMA_TEXT = {"sliding_window": 6, "query_pre_attn_scalar": 8}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", "projection_dim": 16, **VISION},
        {"image_token_index": IMAGE_TOKEN},
    ),
    "gemma3": (
        {"model_type": "gemma3_text", **GEMMA_TEXT},
        {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN},
    ),
    "idefics3": (
        {"model_type": "llama"},
        {"model_type": "idefics3_vision", **VISION},
        {"image_token_id": IMAGE_TOKEN, "scale_factor": 2},
    ),
    "qwen2_vl": (QWEN_TEXT, QWEN_VISION, {"image_token_id": IMAGE_TOKEN}),
    "qwen2_5_vl": (QWEN_TEXT, QWEN_2_5_VISION, {"image_token_id": IMAGE_TOKEN}),
}
"""By model type: its text config, its vision config, its own fields."""

LATER_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}
PERCEIVER = {
    "hidden_size": 32,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "num_key_value_heads": 1,
    "resampler_head_dim": 8,
}
SIDES = {"image_size": [8, 8], "patch_size": [4, 4]}
MORE_KINDS = {
    "idefics2": (
        {"model_type": "mistral"},
        {"model_type": "idefics2_vision", **VISION},
        {"image_token_id": IMAGE_TOKEN, "perceiver_config": PERCEIVER},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {"model_type": "internvl_vision", **VISION, **SIDES},
        {"image_token_id": IMAGE_TOKEN, "downsample_ratio": 0.5},
    ),
    "qwen3_vl": (QWEN_TEXT, LATER_QWEN_VISION, {"image_token_id": IMAGE_TOKEN}),
    "smolvlm": (
        {"model_type": "llama"},
        {"model_type": "smolvlm_vision", **VISION},
        {"image_token_id": IMAGE_TOKEN, "scale_factor": 2},
    ),
}
"""The same for model types that are tested with tensors only, without a processor."""

TEXT = {"num_hidden_layers": 2, **COMMON}


def build(kind: str) -> PreTrainedModel:
    """Return a random model of this type, the same every time."""
    text, vision, own = (KINDS | MORE_KINDS)[kind]
    config = AutoConfig.for_model(kind, text_config={**TEXT, **text}, vision_config=vision, **own)
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        # Gemma 3's projection is initialized to zeros, and no image would make a difference.
        if parameter.dim() > 1 and not parameter.any():
            parameter.data.normal_()
    return model
