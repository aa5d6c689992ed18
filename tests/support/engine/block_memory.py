"""Blocks as tests see them: their memory, their bookkeeping, and the tokens in them."""

from collections.abc import Sequence

import torch

from loradock.engine.serving.blocks import BLOCK_TOKENS, BlockPool
from loradock.engine.serving.paged_batch import PagedBatch
from loradock.engine.serving.paged_cache import PagedKVCache


def poison(cache: PagedKVCache, blocks: Sequence[int]) -> None:
    """Overwrite the keys and values of blocks in all layers with NaN."""
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            heads, _, width = buffer.shape
            buffer.view(heads, -1, BLOCK_TOKENS, width)[:, list(blocks)] = torch.nan


def references(pool: BlockPool, block: int) -> int:
    """Return the number of sequences that refer to a block."""
    return pool._references[block]


def check_pool(pool: BlockPool) -> None:
    """Check that every block is in one state, and that counts and keys agree with the states."""
    free, cached = pool._is_free, pool._cached
    for block, count in enumerate(pool._references):
        assert (count > 0) + (block in cached) + free[block] == 1, block
    assert pool._free == sum(free)
    assert b"\1" * (pool._longest_max + 1) not in free, "the longest run of free blocks is wrong"
    assert {block: key for key, block in pool._block_of.items()} == pool._key_of
    assert cached.keys() <= pool._key_of.keys()
    assert not any(free[block] for block in pool._key_of)


def tokens_in_blocks(batch: PagedBatch) -> int:
    """Return the tokens in the blocks that sequences refer to, each shared block counted once."""
    lengths = {
        block: min(BLOCK_TOKENS, one.table.length - number * BLOCK_TOKENS)
        for one in (*batch._members, *batch._suspended.values())
        for number, block in enumerate(one.table.blocks, one.table.released)
    }
    return sum(max(0, length) for length in lengths.values())
