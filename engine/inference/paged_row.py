"""A sequence over blocks: its tokens that are not in the cache, and the blocks that it needs.

Rows that are suspended keep their blocks until others need them, so one row alone has the blocks
that it may need, regardless of what is suspended.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from loradock.engine.inference.sequence import Sequence
from loradock.engine.paging.block_pool import BLOCK_TOKENS, NoFreeBlocks, Prefix
from loradock.engine.paging.block_table import BlockTable, blocks_of
from loradock.engine.paging.paged_cache import FlatRow, PagedKVCache, RowStates


class PagedRow:
    """A sequence of the batch and its blocks, of which it holds at most `blocks_max` at once.

    `tokens`: those to be prefilled. `offset`: see `FlatRow`. `prompt_length`: that of
    the sequence when it began. `keys`: of its full blocks that may be
    shared, without the last token; empty if none may. `is_scored`: whether the prompt's
    log-probabilities are needed; then it is computed whole, and others may reuse its blocks.
    `states`: the keys and values of its tokens while it has no blocks for them.
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
        self.states: RowStates | None = None
        self._blocks_max = blocks_max

    @property
    def is_prefilled(self) -> bool:
        """Whether the prompt is in the cache."""
        return self.table.length >= len(self.tokens)

    @property
    def has_begun(self) -> bool:
        """Whether it has blocks, or tokens that were in blocks."""
        return bool(self.table.length or self.table.blocks)

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
        windows = self.table.start + 2 * self._blocks_max * BLOCK_TOKENS
        expected = min(self.sequence.tokens_max, windows)
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


class SuspendedRows:
    """The rows that are suspended, by sequence, in the order in which they were.

    `lose` is called with a row that can't be copied to the host, and the error.
    """

    def __init__(self, cache: PagedKVCache, lose: Callable[[PagedRow, Exception], None]) -> None:
        self._cache = cache
        self._lose = lose
        self._rows: dict[Sequence, PagedRow] = {}

    def __iter__(self) -> Iterator[PagedRow]:
        return iter(self._rows.values())

    def add(self, row: PagedRow) -> None:
        """Add a row, with its blocks."""
        self._rows[row.sequence] = row

    def get(self, sequence: Sequence) -> PagedRow | None:
        """Return a sequence's row; None where it is to be computed from its tokens."""
        return self._rows.get(sequence)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Drop the rows of these sequences and free their blocks."""
        for sequence in sequences:
            row = self._rows.pop(sequence, None)
            if row is not None:
                row.table.release()

    def remove(self, row: PagedRow) -> None:
        """Remove a row that continues, which may be none of them."""
        self._rows.pop(row.sequence, None)

    def free_blocks(self, keep: PagedRow | None = None) -> bool:
        """Free the blocks of the row that was suspended first; return whether one had blocks.

        It will be computed again, unless it can't be, or is spared: then it is copied to the host.
        """
        row = next((one for one in self if one.table.blocks and one is not keep), None)
        if row is None:
            return False
        if row.can_leave and not self._spares(row, keep):
            self.forget([row.sequence])
            return True
        try:
            row.states = self._cache.read(row.table)
        except (RuntimeError, MemoryError) as error:
            self._lose(row, error)
        else:
            row.table.vacate()
        return True

    def _spares(self, row: PagedRow, keep: PagedRow | None) -> bool:
        """Whether to keep what a row has computed of its prompt: only the first one's by rank.

        Otherwise two prompts that take longer than a turn could each undo the other's turn forever.
        """
        if row.is_prefilled or row.table.length == row.table.reused:
            return False
        spared = [one for one in self if one.states and one.can_leave and one is not keep]
        if any(one.sequence.rank < row.sequence.rank for one in spared):
            return False
        self.forget([one.sequence for one in spared])
        return True
