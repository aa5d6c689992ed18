"""Adapters in the order of their last use.

The order is a function of the stamps alone, so it can be derived from the adapters' records.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from loradock.messages.ids import AdapterId


class LruOrder:
    """Adapters by their stamps, which are unique: the least recently used one is the first.

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
