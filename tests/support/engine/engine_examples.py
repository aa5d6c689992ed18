"""A tiny model's configuration, adapters for it, and a measure of error, for the engine's tests.

The adapters differ in rank, scaling and modules, and their B is not zero, so an engine that
confuses two of them computes clearly different numbers.
"""

import torch
from transformers import LlamaConfig

from examples.tiny_recipe import BOS_ID, EOS_ID, PAD_ID

VOCABULARY = 259
CONTEXT_TOKENS_MAX = 128
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "everything": {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP},
    "attention": {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "use_rslora": True},
    "mlp": {"r": 16, "lora_alpha": 4, "target_modules": MLP},
    "output": {"r": 2, "lora_alpha": 5, "target_modules": ["o_proj"]},
    "patterns": {
        "r": 3,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 7},
        "alpha_pattern": {"down_proj": 9},
    },
}
NAMES = tuple(ADAPTERS)


def tiny_config(**changes: object) -> LlamaConfig:
    """Return a Llama configuration with fewer key and value heads than query heads."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        # Larger than usual, so that the logits of a random model differ clearly.
        "initializer_range": 0.3,
    }
    return LlamaConfig(**(fields | changes))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference divided by the norm of `expected`, in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
