"""One row's blocks: reserved before its tokens are computed, published once they are full.

A block's key is a digest of everything that its keys and values depend on: all tokens up to its
end, the version of the row's adapter, and the row's images. Equal keys therefore mean equal
contents, and a row never meets a block of another adapter or of another version of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from engine.paging.block_pool import BLOCK_TOKENS, BlockPool

_DIGEST_BYTES: Final = 16
_TOKEN_BYTES: Final = 8


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_TOKENS)


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
    computed. `root`: see `root_key`; None publishes and reuses nothing.
    """

    def __init__(self, pool: BlockPool, root: bytes | None) -> None:
        self.blocks: Final[list[int]] = []
        self.length = 0
        self.reused = 0
        self._pool = pool
        self._root = root
        # The keys of the full blocks that were published, in order.
        self._keys: list[bytes] = []

    @property
    def capacity(self) -> int:
        """The tokens for which blocks are reserved."""
        return len(self.blocks) * BLOCK_TOKENS

    def reuse(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Begin with these published blocks, with which the table may have begun already.

        keys: of the blocks, in order. Raises ValueError once the row has tokens of its own.
        """
        if not self.length == self.reused == self.capacity:
            raise ValueError("only a row without tokens of its own can begin with other blocks")
        added = blocks[len(self.blocks) :]
        self._pool.hold(added)
        self.blocks.extend(added)
        self.length = self.reused = self.capacity
        self._keys = list(keys[: len(self.blocks)])

    def reserve(self, tokens: int, expected: int = 0) -> None:
        """Reserve blocks for `tokens` tokens in all; raises `NoFreeBlocks` and changes nothing.

        expected: the tokens that the row will probably have at its end.
        """
        missing = blocks_of(tokens) - len(self.blocks)
        if missing > 0:
            after = self.blocks[-1] if self.blocks else -1
            self.blocks.extend(self._pool.allocate(missing, after, blocks_of(expected)))

    def advance(self, length: int, tokens: Callable[[], Sequence[int]]) -> None:
        """Count the first `length` tokens as computed, and publish the blocks that are now full.

        tokens: returns the row's tokens, at least `length`; called only if a block became full.
        """
        if not self.length <= length <= self.capacity:
            raise ValueError(f"{length} tokens; {self.length} to {self.capacity} are possible")
        self.length = length
        full = length // BLOCK_TOKENS
        if self._root is None or full == len(self._keys):
            return
        known = tokens()
        for number in range(len(self._keys), full):
            start = number * BLOCK_TOKENS
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(_next_key(parent, known[start : start + BLOCK_TOKENS]))
            self._pool.publish(self.blocks[number], self._keys[-1])

    def release(self) -> None:
        """Give up all blocks; published ones are kept while nothing else needs them."""
        self._pool.release(self.blocks)
        self.blocks.clear()
        self._keys.clear()
        self.length = self.reused = 0
