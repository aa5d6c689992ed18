"""The choice of an attention implementation of ours for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PretrainedConfig


@contextmanager
def use_attention(configs: Sequence[PretrainedConfig], name: str) -> Iterator[None]:
    """Let models with these configurations use a registered implementation, without padding.

    `configs`: those of a model, parents before their parts.
    """
    before = [config._attn_implementation for config in configs]
    padding = [getattr(config, "pad_token_id", None) for config in configs]
    for config in configs:
        config._attn_implementation = name
        # A model that has one reads its first tokens on the host, to warn about a missing mask.
        config.pad_token_id = None
    try:
        yield
    finally:
        # A parent's assignment reaches its parts, which follow with values of their own.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        for config, token in zip(configs, padding, strict=True):
            config.pad_token_id = token
