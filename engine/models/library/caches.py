"""Caches of keys, values and other states, as the library's models use them."""

from typing import TYPE_CHECKING, Any

from transformers import cache_utils

from loradock.engine.models.library.stand_ins import find

if TYPE_CHECKING:
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DummyLayer,
        DynamicCache,
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionLayer,
    )

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "DummyLayer",
    "DynamicCache",
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
]


def __getattr__(name: str) -> Any:
    """Return a name of the library's module, or its stand-in; 5.21 has no `DummyLayer`."""
    return find(cache_utils, name)
