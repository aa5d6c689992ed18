"""A dict whose content has a digest that costs only what changed.

What it is: the container of everything that the world holds. What it is not: a log or a cache. One
rule: whoever changes a value in place calls `touch` with its key.

The digest is a sum of one 128-bit xxh3 hash an entry, modulo 2**128 (the incremental multiset hash
of Bellare and Micciancio, 1997, without its cryptographic claim: divergence is an accident here).
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec
import xxhash

K = TypeVar("K", bound=int | str)
V = TypeVar("V")

_MODULUS: Final = 1 << 128
_encode: Final = msgspec.msgpack.Encoder().encode


def entry_hash(key: int | str, value: object) -> int:
    """One entry's part of the digest: it depends on its content and not on the process."""
    return xxhash.xxh3_128_intdigest(_encode((key, value)))


class Ledger(dict[K, V], Generic[K, V]):
    """Entries in insertion order, with the sum of their hashes.

    `touch(key)` says that the value under `key` was changed in place.
    """

    __slots__ = ("_hashes", "_sum", "_touched", "touch")

    def __init__(self) -> None:
        super().__init__()
        self._hashes: dict[K, int] = {}
        self._sum = 0
        self._touched: set[K] = set()
        # The set's own method: this is called several times an input.
        self.touch: Final[Callable[[K], None]] = self._touched.add

    def __setitem__(self, key: K, value: V) -> None:
        dict.__setitem__(self, key, value)
        self.touch(key)

    def __delitem__(self, key: K) -> None:
        dict.__delitem__(self, key)
        self.touch(key)

    def digest(self) -> int:
        """The sum over all entries; only touched ones are hashed."""
        # The order of this set does not matter: a sum has none.
        for key in self._touched:
            self._sum -= self._hashes.pop(key, 0)
            if key in self:
                entry = entry_hash(key, self[key])
                self._hashes[key] = entry
                self._sum += entry
        self._touched.clear()
        self._sum %= _MODULUS
        return self._sum

    def digest_from_scratch(self) -> int:
        """The same sum with nothing remembered: what `digest` is held against."""
        return sum(entry_hash(key, value) for key, value in self.items()) % _MODULUS
