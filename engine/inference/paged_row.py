"""A sequence over blocks: its tokens that are not in the cache, and the blocks that it needs."""

from typing import Final

from engine.inference.sequence import Sequence
from engine.paging.block_pool import BLOCK_TOKENS, NoFreeBlocks, Prefix
from engine.paging.block_table import BlockTable, blocks_of
from engine.paging.paged_cache import FlatRow


class PagedRow:
    """A sequence of the batch and its blocks, of which it holds at most `blocks_max` at once.

    `tokens`: those to be prefilled. `offset`: see `FlatRow`. `prompt_length`: that of
    the sequence when it began. `keys`: of its full blocks that may be
    shared, without the last token; empty if none may. `is_scored`: whether the prompt's
    log-probabilities are needed; then it is computed whole, and others may reuse its blocks.
    """

    def __init__(self, sequence: Sequence, table: BlockTable, blocks_max: int) -> None:
        self.sequence: Final = sequence
        self.table: Final = table
        self.tokens: Final = sequence.tokens
        self.prompt_length: Final = sequence.prompt_length
        self.is_scored: Final = sequence.needs_prompt_logprobs
        images = sequence.images
        self.offset: Final = 0 if images is None else images.offset
        self.keys: Final = table.keys_of(self.tokens[:-1])
        self._blocks_max = blocks_max

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

    def missing_blocks(self, begun: Prefix) -> int:
        """Return the blocks that it needs until its prompt is in the cache, or to its end.

        begun: the blocks that it has, or with which it can begin.
        """
        tokens = len(self.tokens) if self.sequence.can_resume else self.sequence.tokens_max
        return max(0, min(blocks_of(tokens) - begun.end, self._blocks_max - len(begun.blocks)))

    def reserve(self, tokens: int) -> bool:
        """Reserve blocks for `tokens` tokens in all; return False where there are too few."""
        # A window that advances through the memory stays adjacent where it has room for two.
        expected = min(self.sequence.tokens_max, 2 * self._blocks_max * BLOCK_TOKENS)
        try:
            self.table.reserve(tokens, expected)
        except NoFreeBlocks:
            return False
        return True

    def advance(self, length: int) -> None:
        """Count the first `length` tokens as computed."""
        self.table.advance(length, lambda: self.sequence.tokens)

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
