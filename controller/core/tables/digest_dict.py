"""A dict with an incremental digest: only changed entries are hashed again.

After a value is changed in place, `mark_changed` must be called with its key.

The digest is the sum of one 128-bit xxh3 hash per entry, modulo 2**128 (the incremental multiset
hash of Bellare and Micciancio, 1997, without its cryptographic claim: divergence is an accident
here).
"""

from collections.abc import Callable, Iterable
from typing import Final, Generic, Self, TypeVar

import msgspec
import xxhash

K = TypeVar("K", bound=int | str)
V = TypeVar("V")

_MODULUS: Final = 1 << 128
_encode: Final = msgspec.msgpack.Encoder().encode


def entry_hash(key: int | str, value: object) -> int:
    """Return one entry's summand, a function of its content only."""
    return xxhash.xxh3_128_intdigest(_encode((key, value)))


class DigestDict(dict[K, V], Generic[K, V]):
    """Entries in insertion order, with the sum of their hashes.

    `mark_changed(key)` records that the value under `key` was changed in place. `membership`
    changes whenever an entry is set or deleted.
    """

    __slots__ = ("_changed", "_hashes", "_sum", "mark_changed", "membership")

    def __init__(self) -> None:
        super().__init__()
        self._hashes: dict[K, int] = {}
        self._sum = 0
        self.membership = 0
        self._changed: set[K] = set()
        # The set's own method, because it is called several times per input.
        self.mark_changed: Final[Callable[[K], None]] = self._changed.add

    @classmethod
    def of(cls, entries: Iterable[tuple[K, V]]) -> Self:
        """Return a dict with these entries."""
        made = cls()
        dict.update(made, entries)
        made._hashes = {key: entry_hash(key, value) for key, value in made.items()}
        made._sum = sum(made._hashes.values()) % _MODULUS
        made.membership = len(made)
        return made

    def __setitem__(self, key: K, value: V) -> None:
        dict.__setitem__(self, key, value)
        self.membership += 1
        self.mark_changed(key)

    def __delitem__(self, key: K) -> None:
        dict.__delitem__(self, key)
        self.membership += 1
        self.mark_changed(key)

    def digest(self) -> int:
        """Return the sum over all entries; hashes the changed ones only."""
        # The order of this set does not matter, because addition is commutative.
        for key in self._changed:
            self._sum -= self._hashes.pop(key, 0)
            if key in self:
                entry = entry_hash(key, self[key])
                self._hashes[key] = entry
                self._sum += entry
        self._changed.clear()
        self._sum %= _MODULUS
        return self._sum

    def digest_from_scratch(self) -> int:
        """Return the same sum, with every entry hashed anew."""
        return sum(entry_hash(key, value) for key, value in self.items()) % _MODULUS
