"""The choice of an attention implementation of ours for a while."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PretrainedConfig


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
