"""The sizes of the clients' windows, and the client with the largest one."""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final


class WindowSizes:
    """Clients by the sizes of their windows.

    Each client is once in `_clients`. The heap of a size has at most two entries per client of that
    size, so that all memory here is proportional to the number of windows.
    """

    __slots__ = ("_clients", "_heaps", "largest")

    def __init__(self, sizes: Iterable[tuple[str, int]]) -> None:
        """`sizes`: every client with a window, and its number of answers."""
        self._clients: Final[dict[int, set[str]]] = {}
        for client, size in sizes:
            self._clients.setdefault(size, set()).add(client)
        # Names by size, for sizes that were the largest when `largest_client` was called. A client
        # that has another size meanwhile is dropped when it comes first.
        self._heaps: Final[dict[int, list[str]]] = {}
        self.largest = max(self._clients, default=0)

    def change(self, client: str, before: int, after: int) -> None:
        """Note that a window's size has changed; 0 means that there is none."""
        clients, heaps = self._clients, self._heaps
        if before:
            others = clients[before]
            others.remove(client)
            if before in heaps:
                self._drop_long_heap(before)
            if not others:
                del clients[before]
        if after:
            same = clients.get(after)
            if same is None:
                clients[after] = {client}
            else:
                same.add(client)
                if after in heaps:
                    heappush(heaps[after], client)
                    self._drop_long_heap(after)
        largest = max(self.largest, after)
        while largest and largest not in clients:
            largest -= 1
        self.largest = largest

    def largest_client(self) -> str:
        """Return the client with the largest window; of several, the first by name.

        There must be a window.
        """
        clients = self._clients[self.largest]
        heap = self._heaps.get(self.largest)
        if heap is None:
            heap = self._heaps[self.largest] = list(clients)
            heapify(heap)
        while heap[0] not in clients:
            heappop(heap)
        return heap[0]

    def _drop_long_heap(self, size: int) -> None:
        """Drop a heap with too many entries; it is made again when it is needed."""
        if len(self._heaps[size]) > 2 * len(self._clients[size]):
            del self._heaps[size]
