"""A sequence over blocks: its tokens that are not in the cache, and the blocks that it needs."""

from typing import Final

from engine.inference.sequence import Sequence
from engine.paging.block_pool import BlockPool
from engine.paging.block_table import BlockTable, block_keys, blocks_of
from engine.paging.paged_cache import FlatRow


class PagedRow:
    """A sequence of the batch and its blocks.

    `tokens`: those to be prefilled. `offset`: see `FlatRow`. `prompt_length`: that of
    the sequence when it began. `keys`: of its full blocks that may be
    shared, without the last token; empty if none may. `is_scored`: whether the prompt's
    log-probabilities are needed; then it is computed whole, and others may reuse its blocks.
    """

    def __init__(self, sequence: Sequence, pool: BlockPool, root: bytes | None) -> None:
        self.sequence: Final = sequence
        self.table: Final = BlockTable(pool, root)
        self.tokens: Final = sequence.tokens
        self.prompt_length: Final = sequence.prompt_length
        self.is_scored: Final = sequence.needs_prompt_logprobs
        images = sequence.images
        self.offset: Final = 0 if images is None else images.offset
        self.keys: Final = [] if root is None else list(block_keys(root, self.tokens[:-1]))

    @property
    def is_prefilled(self) -> bool:
        """Whether the prompt is in the cache."""
        return self.table.length >= len(self.tokens)

    @property
    def left(self) -> int:
        """The tokens that are not in the cache: of the prompt, or the one sampled last."""
        return 1 if self.is_prefilled else len(self.tokens) - self.table.length

    @property
    def can_leave(self) -> bool:
        """Whether the sequence can be computed again."""
        return self.sequence.can_resume or self.sequence.images is not None

    @property
    def missing_blocks(self) -> int:
        """The blocks that the sequence needs until its prompt is in the cache, or to its end."""
        tokens = len(self.tokens) if self.sequence.can_resume else self.sequence.tokens_max
        return max(0, blocks_of(tokens) - len(self.table.blocks))

    def next_tokens(self, count: int) -> FlatRow:
        """Return the next `count` tokens of the sequence, for which blocks are reserved."""
        if self.is_prefilled:
            return FlatRow(
                [self.sequence.output.tokens[-1]],
                self.table,
                self.offset,
                prompt=self.prompt_length,
            )
        begin = self.table.length
        tokens = self.tokens[begin : begin + count]
        return FlatRow(tokens, self.table, self.offset, self.is_scored, self.prompt_length)
