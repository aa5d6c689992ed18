"""A dict with an incremental digest: only changed entries are hashed again.

After a value is changed in place, `mark_changed` must be called with its key.

The digest is the sum of one 128-bit xxh3 hash per entry, modulo 2**128 (the incremental multiset
hash of Bellare and Micciancio, 1997, without its cryptographic claim: divergence is an accident
here).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, Self, TypeVar

import msgspec
import xxhash

K = TypeVar("K", bound=int | str)
V = TypeVar("V")

_MODULUS: Final = 1 << 128
_encode: Final = msgspec.msgpack.Encoder().encode


def _hashes(entries: Iterable[tuple[int | str, object]]) -> Iterator[int]:
    """Yield the summand of each entry, a function of its key and its value only."""
    return map(xxhash.xxh3_128_intdigest, map(_encode, entries))


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
        made._hashes = dict(zip(made, _hashes(made.items()), strict=True))
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
        if key in self._hashes:
            self.mark_changed(key)
        else:
            # It was in no digest. Where none is ever computed, deleted keys would accumulate.
            self._changed.discard(key)

    def digest(self) -> int:
        """Return the sum over all entries; hashes the changed ones only."""
        # The order of this set does not matter, because addition is commutative.
        changed, hashes = self._changed, self._hashes
        present = [key for key in changed if key in self]
        before = sum([hashes.pop(key, 0) for key in changed])
        entries = tuple(_hashes([(key, self[key]) for key in present]))
        hashes.update(zip(present, entries, strict=True))
        changed.clear()
        self._sum = (self._sum - before + sum(entries)) % _MODULUS
        return self._sum

    def digest_from_scratch(self) -> int:
        """Return the same sum, with every entry hashed anew."""
        return sum(_hashes(self.items())) % _MODULUS
