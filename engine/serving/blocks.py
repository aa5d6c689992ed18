"""Blocks of the KV cache: those that sequences refer to, those cached by prefix, and free ones.

A block stores the keys and values of `BLOCK_TOKENS` tokens of one sequence. This module has no
tensors; `loradock.engine.serving.paged_cache` has the memory that the numbers stand for.

A block's key is a digest of everything that its keys and values depend on: all tokens up to its
end, the version of the sequence's adapter, and the sequence's images. Equal keys therefore mean
equal contents, and a sequence never meets a block of another adapter or of another version of it.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

BLOCK_TOKENS: Final = 16
"""The tokens of a block: half a block per sequence is unused on average, and prefixes are reused
in multiples of it."""

_FREE_SHARE: Final = 0.25
"""The share of all blocks that may be made free so that those of a sequence are adjacent.

Without it hardly any sequence's blocks are, once all have been used.
"""


class NoFreeBlocks(Exception):  # noqa: N818 - a normal condition, after which a sequence waits
    """Fewer blocks are free or evictable than were requested; nothing has changed."""


class Prefix(NamedTuple):
    """The first `end` blocks of a sequence; `blocks`: the last of them, of which it has use."""

    end: int = 0
    blocks: Sequence[int] = ()


class BlockPool:
    """Numbers of blocks from 0 to `blocks - 1`, each in exactly one of three states.

    Referenced: in the tables of `references` sequences. Cached: registered under a key, so that a
    sequence with the same prefix can refer to it again, and referenced by none. Free: neither.
    Cached blocks are evicted, the least recently used first, if too few are free, or too few of
    them adjacent for a sequence.
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
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._next_start = 0

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated: those that are free or cached."""
        return self._free + len(self._cached)

    @property
    def referenced(self) -> int:
        """The number of blocks that sequences refer to."""
        return self.blocks - self.available

    def allocate(self, count: int, after: int = -1, room: int = 0) -> list[int]:
        """Return `count` blocks, referenced once; raises `NoFreeBlocks` if there are too few.

        after: the last block of the sequence, or -1 for a new one. room: the blocks that the
        sequence will probably need in total. A sequence's blocks are adjacent if possible, because
        attention reads adjacent blocks in place.
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
        """Return the longest beginning of `keys` whose last `needed` blocks have keys."""
        first = end = len(keys)
        while first > 0 and end - first < needed:
            first -= 1
            if keys[first] not in self._block_of:
                end = first
        return Prefix(end, [self._block_of[key] for key in keys[first:end]])

    def cached_among(self, blocks: Sequence[int]) -> int:
        """Return the number of these blocks that no sequence refers to."""
        return sum(block in self._cached for block in blocks)

    def reference(self, blocks: Iterable[int]) -> None:
        """Refer to each of these blocks, which have keys, once more."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def register(self, block: int, key: bytes) -> None:
        """Let sequences with the prefix `key` find a block, unless another one has the key."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence, in the order of its table.

        The end of a sequence becomes the least recently used part, because it is of no use without
        its beginning.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._set_free(block)

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
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

        Cached blocks are evicted for them while few are free. Sequences that ended long ago were
        often adjacent, so few evictions make a run of the oldest. At least one block is free.
        """
        while True:
            if length <= self._longest_max:
                start = self._start_of_run(length)
                if start >= 0:
                    return start
                self._longest_max = length - 1
            elif self._cached and self._free < _FREE_SHARE * self.blocks:
                self._evict()
            else:
                length //= 2

    def _start_of_run(self, length: int) -> int:
        """Return the start of `length` free blocks, after the room of the one before; -1 if none.

        Starts advance through the pool, so that the room of a running sequence stays free for long.
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
        """Refer to a free block."""
        self._is_free[block] = 0
        self._free -= 1
        self._references[block] = 1


_DIGEST_BYTES: Final = 16
_TOKEN_BYTES: Final = 8


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_TOKENS)


def blocks_around(tokens: int) -> int:
    """Return the most blocks that `tokens` adjacent tokens can be in, wherever the first is."""
    return blocks_of(tokens - 1) + 1


def common_blocks(first: Sequence[int], last: Sequence[int], begin: int = 0) -> int:
    """Return how many blocks two sequences begin with in common, of which `begin` are known."""
    same, most = begin, min(len(first), len(last))
    while same < most:
        middle = (same + most + 1) // 2
        if first[same:middle] == last[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


def root_key(*parts: str | bytes) -> bytes:
    """Return the key before the first block; `parts`: the adapter's version, the images."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        # Lengths keep ("ab", "c") and ("a", "bc") apart.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_keys(root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the key of each full block of `tokens`."""
    key = root
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = _next_key(key, tokens[start : start + BLOCK_TOKENS])
        yield key


def _next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    words = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in tokens)
    return blake2b(parent + words, digest_size=_DIGEST_BYTES).digest()


class BlockTable:
    """The blocks of one sequence, in the order of its tokens, and the number of tokens in them.

    Blocks are reserved before their tokens are computed, and registered once they are full.
    `length`: the tokens whose keys and values have been computed. `reused`: those that another
    sequence computed. `root`: see `root_key`; None registers and reuses nothing. `lookback`: how
    many tokens before itself a token attends to at most; blocks before these are given up as the
    sequence advances, so if all layers have windows, it has blocks for its window only.
    `released`: the number of blocks that were given up, `blocks`: those after them. `appended`: the
    number of blocks, given up or not, that its row of the device's table has; see
    `DeviceBlockTable`.
    """

    def __init__(self, pool: BlockPool, root: bytes | None, lookback: int = sys.maxsize) -> None:
        self.blocks: Final[list[int]] = []
        self.released = 0
        self.appended = 0
        self.length = 0
        self.reused = 0
        self._pool = pool
        self._root = root
        self._lookback = lookback
        # The keys of the full blocks that were registered, in order.
        self._keys: list[bytes] = []

    @property
    def start(self) -> int:
        """The first token that is in a block."""
        return self.released * BLOCK_TOKENS

    @property
    def prefix(self) -> Prefix:
        """The blocks that are or were reserved, as the beginning of the sequence."""
        return Prefix(self.released + len(self.blocks), self.blocks)

    @property
    def capacity(self) -> int:
        """The tokens for which blocks are or were reserved."""
        return (self.released + len(self.blocks)) * BLOCK_TOKENS

    def place(self, token: int) -> int:
        """Return the place of a token, from `start` on, in the memory of all blocks."""
        number, inside = divmod(token - self.start, BLOCK_TOKENS)
        return self.blocks[number] * BLOCK_TOKENS + inside

    def keys_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full blocks of these tokens; none if it shares nothing."""
        return [] if self._root is None else list(block_keys(self._root, tokens))

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """Return the longest beginning of a sequence with these keys that `reuse` accepts."""
        return self._pool.find(keys, blocks_of(self._lookback))

    def reuse(self, prefix: Prefix, keys: Sequence[bytes]) -> None:
        """Begin with this prefix, with a part of which the table may have begun already.

        keys: of all blocks, in order. Raises ValueError once the table has computed tokens.
        """
        if not self.length == self.reused == self.capacity:
            raise ValueError("only a table without computed tokens can begin with other blocks")
        self._pool.reference(prefix.blocks)
        self._pool.release(self.blocks)
        self.blocks[:] = prefix.blocks
        self.released = prefix.end - len(prefix.blocks)
        self.length = self.reused = self.capacity
        self.appended = 0
        self._keys = list(keys[: prefix.end])

    def reserve(self, tokens: int, expected: int = 0) -> None:
        """Reserve blocks for `tokens` tokens in all; raises `NoFreeBlocks` and changes nothing.

        expected: the tokens that the sequence will probably have at its end.
        """
        missing = blocks_of(tokens) - self.prefix.end
        if missing > 0:
            after = self.blocks[-1] if self.blocks else -1
            room = blocks_of(expected) - self.prefix.end
            self.blocks.extend(self._pool.allocate(missing, after, room))

    def advance(self, length: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Count the first `length` tokens as computed; register the blocks that are now full.

        Blocks that no later token attends to are given up. tokens: returns the sequence's tokens,
        at least `length`; called only if a block became full.
        """
        if not self.length <= length <= self.capacity:
            raise ValueError(f"length must be {self.length} to {self.capacity}, got {length}")
        self.length = length
        if self._root is not None and length // BLOCK_TOKENS > len(self._keys):
            self._register(self._root, tokens())
        passed = max(0, length - self._lookback) // BLOCK_TOKENS - self.released
        if passed > 0:
            self._pool.release(self.blocks[:passed])
            del self.blocks[:passed]
            self.released += passed

    def vacate(self) -> None:
        """Give up all blocks, but count their tokens: `reserve` provides blocks for them again.

        The tokens have to be written there before they are read.
        """
        self._pool.release(self.blocks)
        self.blocks.clear()
        self.appended = 0

    def release(self) -> None:
        """Give up all blocks; those with keys stay cached while nothing else needs them."""
        self._pool.release(self.blocks)
        self.blocks.clear()
        self._keys.clear()
        self.length = self.reused = self.released = self.appended = 0

    def _register(self, root: bytes, tokens: Sequence[int]) -> None:
        """Register the full blocks that have no keys yet."""
        for number in range(len(self._keys), self.length // BLOCK_TOKENS):
            begin = number * BLOCK_TOKENS
            parent = self._keys[-1] if self._keys else root
            self._keys.append(_next_key(parent, tokens[begin : begin + BLOCK_TOKENS]))
            self._pool.register(self.blocks[number - self.released], self._keys[-1])
