"""One row's blocks: reserved before its tokens are computed, published once they are full.

Blocks that no later token attends to are given up. A row of a model whose layers all have
windows has blocks for its window only.

A block's key is a digest of everything that its keys and values depend on: all tokens up to its
end, the version of the row's adapter, and the row's images. Equal keys therefore mean equal
contents, and a row never meets a block of another adapter or of another version of its own.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from loradock.engine.paging.block_pool import BLOCK_TOKENS, BlockPool, Prefix

_DIGEST_BYTES: Final = 16
_TOKEN_BYTES: Final = 8


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_TOKENS)


def blocks_around(tokens: int) -> int:
    """Return the most blocks that `tokens` adjacent tokens can be in, wherever the first one is."""
    return blocks_of(tokens - 1) + 1


def root_key(*parts: str | bytes) -> bytes:
    """Return the key before a row's first block; `parts`: the adapter's version, the images."""
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
    """The blocks of one row, in the order of its tokens, and how many of its tokens are in them.

    `length`: the tokens whose keys and values have been computed. `reused`: those that another row
    computed. `root`: see `root_key`; None publishes and reuses nothing. `reach`: how many tokens
    before itself a token attends to at most; blocks before these are given up as the row advances.
    `released`: the number of blocks that were given up, `blocks`: those after them.
    """

    def __init__(self, pool: BlockPool, root: bytes | None, reach: int = sys.maxsize) -> None:
        self.blocks: Final[list[int]] = []
        self.released = 0
        self.length = 0
        self.reused = 0
        self._pool = pool
        self._root = root
        self._reach = reach
        # The keys of the full blocks that were published, in order.
        self._keys: list[bytes] = []

    @property
    def start(self) -> int:
        """The first token that the row holds."""
        return self.released * BLOCK_TOKENS

    @property
    def prefix(self) -> Prefix:
        """The blocks that are or were reserved, as the beginning of the row."""
        return Prefix(self.released + len(self.blocks), self.blocks)

    @property
    def capacity(self) -> int:
        """The tokens for which blocks are or were reserved."""
        return self.prefix.end * BLOCK_TOKENS

    def place(self, token: int) -> int:
        """Return where a token of the row, from `start` on, is in the memory of all blocks."""
        number, inside = divmod(token - self.start, BLOCK_TOKENS)
        return self.blocks[number] * BLOCK_TOKENS + inside

    def keys_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full blocks of these tokens; none if the row shares nothing."""
        return [] if self._root is None else list(block_keys(self._root, tokens))

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """Return the longest beginning of a row with these keys that `reuse` accepts."""
        return self._pool.find(keys, blocks_of(self._reach))

    def reuse(self, prefix: Prefix, keys: Sequence[bytes]) -> None:
        """Begin with this prefix, with a part of which the table may have begun already.

        keys: of all blocks, in order. Raises ValueError once the row has tokens of its own.
        """
        if not self.length == self.reused == self.capacity:
            raise ValueError("only a row without tokens of its own can begin with other blocks")
        self._pool.hold(prefix.blocks)
        self._pool.release(self.blocks)
        self.blocks[:] = prefix.blocks
        self.released = prefix.end - len(prefix.blocks)
        self.length = self.reused = self.capacity
        self._keys = list(keys[: prefix.end])

    def reserve(self, tokens: int, expected: int = 0) -> None:
        """Reserve blocks for `tokens` tokens in all; raises `NoFreeBlocks` and changes nothing.

        expected: the tokens that the row will probably have at its end.
        """
        missing = blocks_of(tokens) - self.prefix.end
        if missing > 0:
            after = self.blocks[-1] if self.blocks else -1
            room = blocks_of(expected) - self.prefix.end
            self.blocks.extend(self._pool.allocate(missing, after, room))

    def advance(self, length: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Count the first `length` tokens as computed; publish the blocks that are now full.

        Blocks that no later token attends to are given up. tokens: returns the row's tokens, at
        least `length`; called only if a block became full.
        """
        if not self.length <= length <= self.capacity:
            raise ValueError(f"{length} tokens; {self.length} to {self.capacity} are possible")
        self.length = length
        if self._root is not None and length // BLOCK_TOKENS > len(self._keys):
            self._publish(self._root, tokens())
        passed = max(0, length - self._reach) // BLOCK_TOKENS - self.released
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

    def release(self) -> None:
        """Give up all blocks; published ones are kept while nothing else needs them."""
        self._pool.release(self.blocks)
        self.blocks.clear()
        self._keys.clear()
        self.length = self.reused = self.released = 0

    def _publish(self, root: bytes, tokens: Sequence[int]) -> None:
        """Publish the full blocks that have not been published."""
        for number in range(len(self._keys), self.length // BLOCK_TOKENS):
            begin = number * BLOCK_TOKENS
            parent = self._keys[-1] if self._keys else root
            self._keys.append(_next_key(parent, tokens[begin : begin + BLOCK_TOKENS]))
            self._pool.publish(self.blocks[number - self.released], self._keys[-1])
