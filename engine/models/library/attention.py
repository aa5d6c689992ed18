"""Attention of the library's models: where an implementation of ours is registered and chosen."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, masking_utils, modeling_utils

from loradock.engine.models.library.stand_ins import find

if TYPE_CHECKING:
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
    from transformers.modeling_utils import AttentionInterface

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "causal_mask_function",
    "use_attention",
]


def __getattr__(name: str) -> Any:
    """Return a name of the library's modules, or its stand-in."""
    return find(modeling_utils if name == "AttentionInterface" else masking_utils, name)


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
