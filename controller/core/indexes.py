"""Indexes of the world: a dict with an incremental digest, and two orders of adapters.

The orders are functions of stamps and priorities alone, so they can be derived from the adapters'
records.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Generic, Literal, Self, TypeVar

import msgspec
import xxhash

from loradock.messages.ids import AdapterId, Seq

TierName = Literal["host", "pinned", "device"]

TIERS: Final[tuple[TierName, ...]] = ("host", "pinned", "device")

K = TypeVar("K", bound=int | str)

V = TypeVar("V")

_MODULUS: Final = 1 << 128

_encode: Final = msgspec.msgpack.Encoder().encode


def _hashes(entries: Iterable[tuple[int | str, object]]) -> Iterator[int]:
    """Yield the summand of each entry, a function of its key and its value only."""
    return map(xxhash.xxh3_128_intdigest, map(_encode, entries))


class DigestDict(dict[K, V], Generic[K, V]):
    """Entries in insertion order, with the sum of their hashes.

    `mark_changed(key)` records that the value under `key` was changed in place, and must be called
    after that. `membership` changes whenever an entry is set or deleted.

    The digest is the sum of one 128-bit xxh3 hash per entry, modulo 2**128 (the incremental
    multiset hash of Bellare and Micciancio, 1997, without its cryptographic claim: divergence is an
    accident here). Only changed entries are hashed again.
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
        """Return the sum over all entries; hashes the changed entries only."""
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


class LruOrder:
    """Adapters by their stamps, which are unique: the least recently used is the first.

    Iterating while it is changed is undefined.
    """

    __slots__ = ("_ids", "_stamps")

    def __init__(self) -> None:
        self._stamps: list[int] = []
        self._ids: dict[int, AdapterId] = {}

    def __iter__(self) -> Iterator[AdapterId]:
        return map(self._ids.__getitem__, self._stamps)

    def add(self, stamp: int, adapter_id: AdapterId) -> None:
        """Insert an adapter at the place of its stamp."""
        insort(self._stamps, stamp)
        self._ids[stamp] = adapter_id

    def remove(self, stamp: int) -> AdapterId:
        """Remove and return the adapter of a stamp; raises `KeyError` if there is none."""
        adapter_id = self._ids.pop(stamp)
        del self._stamps[bisect_left(self._stamps, stamp)]
        return adapter_id


class TierQueues:
    """Adapters that wait for room in a tier; an adapter is in one queue at most.

    `by_tier` holds (priority, adapter) pairs in order, `members` each adapter's queue and priority.
    Both are for reading only.
    """

    __slots__ = ("by_tier", "members")

    def __init__(self) -> None:
        self.by_tier: Final[dict[TierName, list[tuple[Seq, AdapterId]]]] = {t: [] for t in TIERS}
        self.members: Final[dict[AdapterId, tuple[TierName, Seq]]] = {}

    def join(self, tier: TierName, adapter_id: AdapterId, priority: Seq) -> None:
        """Insert an adapter into a tier's queue, after those with a lower priority number."""
        insort(self.by_tier[tier], (priority, adapter_id))
        self.members[adapter_id] = (tier, priority)

    def leave(self, adapter_id: AdapterId) -> None:
        """Remove an adapter from its queue."""
        tier, priority = self.members.pop(adapter_id)
        queue = self.by_tier[tier]
        del queue[bisect_left(queue, (priority, adapter_id))]

    def reprioritize(self, adapter_id: AdapterId, priority: Seq) -> None:
        """Move an adapter to the position that its new priority has in the same queue."""
        tier, current = self.members[adapter_id]
        if current != priority:
            self.leave(adapter_id)
            self.join(tier, adapter_id, priority)

    def clear(self) -> None:
        """Remove all adapters from all queues."""
        for queue in self.by_tier.values():
            queue.clear()
        self.members.clear()
