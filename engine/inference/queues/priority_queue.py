"""Waiting sequences by priority; those of one priority in fair turns of their adapters."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from loradock.engine.inference.queues.fair_queue import AdapterKey, FairQueue

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """A `FairQueue` per priority; the one with the smallest number is served first.

    The bound of a `FairQueue` on a sequence's wait holds among those of its priority.
    """

    def __init__(self, weight_of: Callable[[AdapterKey], int] = lambda _: 1) -> None:
        self._weight_of = weight_of
        self._queues: dict[int, FairQueue[T]] = {}

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        """Yield all items."""
        return chain.from_iterable(self._queues.values())

    @property
    def priority(self) -> int:
        """The priority that is next; the queue must not be empty."""
        return min(self._queues)

    @property
    def adapters(self) -> tuple[AdapterKey, ...]:
        """The adapters with waiting items of the priority that is next, in their turns' order."""
        return self._next.adapters

    def append(self, adapter: AdapterKey, item: T, cost: int, priority: int = 0) -> None:
        """Add an item after the others of its adapter and priority."""
        self._queue(priority).append(adapter, item, cost)

    def append_first(self, adapter: AdapterKey, item: T, cost: int, priority: int = 0) -> None:
        """Add an item before the others of its adapter and priority."""
        self._queue(priority).append_first(adapter, item, cost)

    def charge(self, adapter: AdapterKey, tokens: int) -> None:
        """Count tokens generated for an adapter, of any priority."""
        for queue in self._queues.values():
            queue.charge(adapter, tokens)

    def first(self) -> T:
        """Return the item that `pop` would remove; the queue must not be empty."""
        return self._next.first()

    def pop(self) -> T:
        """Remove and return the next item; the queue must not be empty."""
        item = self._next.pop()
        self._drop_empty()
        return item

    def remove(self, adapter: AdapterKey, item: T) -> bool:
        """Remove an item; return whether it was waiting."""
        found = any(queue.remove(adapter, item) for queue in self._queues.values())
        self._drop_empty()
        return found

    def serve_next(self, adapter: AdapterKey) -> None:
        """Make it the turn of an adapter that `adapters` contains."""
        self._next.serve_next(adapter)

    def _queue(self, priority: int) -> FairQueue[T]:
        """Return the queue of a priority."""
        if priority not in self._queues:
            self._queues[priority] = FairQueue(weight_of=self._weight_of)
        return self._queues[priority]

    @property
    def _next(self) -> FairQueue[T]:
        return self._queues[self.priority]

    def _drop_empty(self) -> None:
        self._queues = {priority: queue for priority, queue in self._queues.items() if queue}
