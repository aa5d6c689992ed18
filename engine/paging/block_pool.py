"""The bookkeeping of blocks: which are free, held by rows, or kept for a prompt with their prefix.

A block stores the keys and values of `BLOCK_TOKENS` tokens of one row. This module has no tensors;
`loradock.engine.paging.paged_cache` has the memory that the numbers stand for.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

BLOCK_TOKENS: Final = 16
"""The tokens of a block: half a block per row is unused on average, and prefixes are reused in
multiples of it."""

_FREE_SHARE: Final = 0.25
"""The share of all blocks that may be made free so that those of a row are adjacent.

Without it hardly any row's blocks are, once all have been used.
"""


class NoFreeBlocks(Exception):  # noqa: N818 - a normal condition, after which a row waits
    """Fewer blocks are free or evictable than were requested; nothing has changed."""


class Prefix(NamedTuple):
    """The first `end` blocks of a row. `blocks` are the last of them; the others are not needed."""

    end: int = 0
    blocks: Sequence[int] = ()


class BlockPool:
    """Numbers of blocks from 0 to `blocks - 1`, each in exactly one of three states.

    Held: in the tables of `references` rows. Kept: published, so that a row with the same prefix
    can hold it again, and held by no row. Free: neither. Kept blocks are evicted, the least
    recently used one first, where too few are free, or too few of them adjacent for a row.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks: Final = blocks
        self._references = [0] * blocks
        # 1 for a free block, so that a run of free ones is found by a search for bytes.
        self._is_free = bytearray(b"\1" * blocks)
        self._free = blocks
        # No run of free blocks is longer: a search of a large pool takes long.
        self._longest_max = blocks
        # The least recently used one comes first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._next_start = 0

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated: free ones and kept ones."""
        return self._free + len(self._kept)

    @property
    def held(self) -> int:
        """The number of blocks that rows hold."""
        return self.blocks - self.available

    def references(self, block: int) -> int:
        """Return the number of rows that hold a block."""
        return self._references[block]

    def allocate(self, count: int, after: int = -1, room: int = 0) -> list[int]:
        """Return `count` blocks, held once; raises `NoFreeBlocks` if there are not that many.

        after: the last block of the row, or -1 for a new row. room: the blocks that the row will
        probably need from now on. A row's blocks are adjacent where possible, because attention
        reads adjacent blocks in place.
        """
        if count > self.available:
            raise NoFreeBlocks(f"{count} blocks requested, {self.available} available")
        while self._free < count:
            self._evict()
        chosen: list[int] = []
        while len(chosen) < count:
            if after < 0 or not self._can_take(after + 1):
                after = self._make_run(max(count, room) - len(chosen)) - 1
            after += 1
            self._take(after)
            chosen.append(after)
        return chosen

    def find(self, keys: Sequence[bytes], needed: int) -> Prefix:
        """Return the longest beginning of `keys` whose last `needed` blocks are published."""
        first = end = len(keys)
        while first > 0 and end - first < needed:
            first -= 1
            if keys[first] not in self._block_of:
                end = first
        return Prefix(end, [self._block_of[key] for key in keys[first:end]])

    def kept_among(self, blocks: Sequence[int]) -> int:
        """Return how many of these published blocks no row holds."""
        return sum(block in self._kept for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more, each."""
        for block in blocks:
            self._references[block] += 1
            self._kept.pop(block, None)

    def publish(self, block: int, key: bytes) -> None:
        """Let rows with the prefix `key` hold a held block, unless another one has that key."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a row, in the order of its table.

        The end of a row becomes the least recently used part, because it is of no use without its
        beginning.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    self._set_free(block)

    def problems(self) -> list[str]:
        """Return what is wrong with the bookkeeping: nothing, unless this class has a defect."""
        found = [
            f"block {block} is in {states} of three states"
            for block, references in enumerate(self._references)
            if (states := (references > 0) + (block in self._kept) + self._is_free[block]) != 1
        ]
        unpublished = self._kept.keys() - self._key_of.keys()
        published = {block for block in self._key_of if self._is_free[block]}
        if self._free != sum(self._is_free):
            found.append(f"{self._free} free blocks are counted, {sum(self._is_free)} are free")
        if b"\1" * (self._longest_max + 1) in self._is_free:
            found.append(f"more than {self._longest_max} adjacent blocks are free")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            found.append("keys and blocks are not each other's inverse")
        if unpublished or published:
            found.append(f"kept without a key: {unpublished}; free with a key: {published}")
        return found

    def _evict(self) -> None:
        block, _ = self._kept.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._is_free[block] = 1
        self._free += 1
        before, end = self._is_free.rfind(0, 0, block), self._is_free.find(0, block)
        length = (end if end >= 0 else self.blocks) - before - 1
        self._longest_max = max(self._longest_max, length)

    def _make_run(self, length: int) -> int:
        """Return the start of `length` free blocks, or of a half, a quarter ... of them.

        Kept blocks are evicted for them while few are free. Rows that ended long ago were often
        adjacent, so few evictions make a run of the oldest. At least one block is free.
        """
        while True:
            if length <= self._longest_max:
                start = self._start_of_run(length)
                if start >= 0:
                    return start
                self._longest_max = length - 1
            elif self._kept and self._free < _FREE_SHARE * self.blocks:
                self._evict()
            else:
                length //= 2

    def _start_of_run(self, length: int) -> int:
        """Return the start of `length` free blocks, after the room of the row before; -1 if none.

        Starts advance through the pool, so that the room of a running row stays free for long.
        """
        run = b"\1" * length
        start = self._is_free.find(run, self._next_start)
        if start < 0:
            start = self._is_free.find(run)
        if start >= 0:
            self._next_start = start + length
        return start

    def _can_take(self, block: int) -> bool:
        return block < self.blocks and bool(self._is_free[block])

    def _take(self, block: int) -> None:
        """Hold a free block."""
        self._is_free[block] = 0
        self._free -= 1
        self._references[block] = 1
