"""Waiting sequences by adapter, served in turn: deficit round robin with tokens as the cost.

An adapter's quantum is its weight times that of a weight of 1. Let the sequence of adapter a, with
all before it in a's own queue, cost C tokens, let Q(b) be the quantum of each adapter b and L the
largest cost of one sequence. Before it is served, every other adapter is served at most

    ceil((C + D) / Q(a)) * Q(b) + L

tokens, where D is what a has generated beyond its credit (Shreedhar and Varghese, 1995). So a wait
depends on the number of waiting adapters, the weights and the sequences of the own adapter, and not
on the number or the length of the sequences of others.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

QUANTUM_TOKENS: Final = 512
"""The tokens that an adapter of weight 1 is served per turn."""

T = TypeVar("T")
AdapterKey = int


class FairQueue(Generic[T]):
    """Waiting items by adapter, those of one adapter in the order of their arrival.

    The cost of an item is given when it is added. `charge` accounts for tokens that are generated
    afterwards.
    """

    def __init__(
        self,
        quantum_tokens: int = QUANTUM_TOKENS,
        weight_of: Callable[[AdapterKey], int] = lambda _: 1,
    ) -> None:
        """`weight_of` returns an adapter's weight, at least 1, whenever it begins to wait."""
        self._quantum_tokens = quantum_tokens
        self._weight_of = weight_of
        self._quantum: dict[AdapterKey, int] = {}
        # The adapter whose turn it is comes first.
        self._by_adapter: OrderedDict[AdapterKey, deque[tuple[T, int]]] = OrderedDict()
        self._credit: dict[AdapterKey, int] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return self._count

    def __iter__(self) -> Iterator[T]:
        """Yield all items, adapter by adapter."""
        return (item for queue in self._by_adapter.values() for item, _ in queue)

    @property
    def adapters(self) -> tuple[AdapterKey, ...]:
        """The adapters that have waiting items, in the order of their turns."""
        return tuple(self._by_adapter)

    def append(self, adapter: AdapterKey, item: T, cost: int) -> None:
        """Add an item after the others of its adapter."""
        self._queue_of(adapter).append((item, cost))
        self._count += 1

    def append_first(self, adapter: AdapterKey, item: T, cost: int) -> None:
        """Add an item before the others of its adapter."""
        self._queue_of(adapter).appendleft((item, cost))
        self._count += 1

    def _queue_of(self, adapter: AdapterKey) -> deque[tuple[T, int]]:
        if adapter not in self._by_adapter:
            self._by_adapter[adapter] = deque()
            self._credit[adapter] = 0
            self._quantum[adapter] = self._quantum_tokens * self._weight_of(adapter)
        return self._by_adapter[adapter]

    def charge(self, adapter: AdapterKey, tokens: int) -> None:
        """Count tokens generated for an adapter; nothing where none of its items waits."""
        if adapter in self._credit:
            self._credit[adapter] -= tokens

    def first(self) -> T:
        """Return the item that `pop` would remove; the queue must not be empty."""
        item, _ = self._by_adapter[self._advance()][0]
        return item

    def pop(self) -> T:
        """Remove and return the next item; the queue must not be empty."""
        adapter = self._advance()
        item, cost = self._by_adapter[adapter].popleft()
        self._credit[adapter] -= cost
        self._count -= 1
        self._drop_if_empty(adapter)
        return item

    def remove(self, adapter: AdapterKey, item: T) -> bool:
        """Remove an item; return whether it was waiting."""
        queue = self._by_adapter.get(adapter, deque())
        found = next((entry for entry in queue if entry[0] is item), None)
        if found is None:
            return False
        queue.remove(found)
        self._count -= 1
        self._drop_if_empty(adapter)
        return True

    def serve_next(self, adapter: AdapterKey) -> None:
        """Make it the turn of a waiting adapter."""
        self._by_adapter.move_to_end(adapter, last=False)
        _, cost = self._by_adapter[adapter][0]
        self._credit[adapter] = max(self._credit[adapter], cost)

    def _advance(self) -> AdapterKey:
        """Give credit in turn until the first adapter can pay for its first item; return it."""
        rounds = self._rounds_needed()
        if rounds > 1:
            # The rounds in which no adapter can pay are counted at once.
            for adapter in self._credit:
                self._credit[adapter] += (rounds - 1) * self._quantum[adapter]
        while True:
            adapter, queue = next(iter(self._by_adapter.items()))
            if self._credit[adapter] >= queue[0][1]:
                return adapter
            self._credit[adapter] += self._quantum[adapter]
            self._by_adapter.move_to_end(adapter)

    def _rounds_needed(self) -> int:
        """Return the rounds after which the first adapter can pay, 0 if one already can."""
        rounds = (
            -((self._credit[adapter] - queue[0][1]) // self._quantum[adapter])
            for adapter, queue in self._by_adapter.items()
        )
        return max(0, min(rounds))

    def _drop_if_empty(self, adapter: AdapterKey) -> None:
        if not self._by_adapter[adapter]:
            del self._by_adapter[adapter], self._credit[adapter], self._quantum[adapter]
