"""Attention of the library's models: where an implementation of ours is registered and chosen."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import causal_mask_function

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "causal_mask_function",
    "use_attention",
]


@contextmanager
def use_attention(configs: Sequence[PretrainedConfig], name: str) -> Iterator[None]:
    """Let models with these configurations use a registered implementation.

    `configs`: those of a model, parents before their parts.
    """
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        # A parent's assignment reaches its parts, which follow with values of their own.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
