"""The memory of blocks, as tests that overwrite it see it."""

from collections.abc import Sequence

import torch

from loradock.engine.paging.block_pool import BLOCK_TOKENS
from loradock.engine.paging.paged_cache import PagedKVCache


def poison(cache: PagedKVCache, blocks: Sequence[int]) -> None:
    """Overwrite the keys and values of blocks in all layers with NaN."""
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            heads, _, width = buffer.shape
            buffer.view(heads, -1, BLOCK_TOKENS, width)[:, list(blocks)] = torch.nan
