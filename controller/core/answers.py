"""The final answers of past requests: a window per client, bounded by number, time and in total.

An answer inside its client's window is returned again to a repeated request. Only the bound on all
windows together takes an answer of one client for the requests of another, and only from the
largest window.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from msgspec import Struct

from loradock.messages.ids import RequestId, client_of
from loradock.messages.requests import Reply

_EXPIRED_PER_ANSWER: Final = 2
"""Bound on the answers that one new answer drops per window for their age, so its cost has one."""


class Answer(Struct, frozen=True, array_like=True, gc=False):
    """The final reply to a request, the hash of the request's body, and the time of the answer."""

    reply: Reply
    body: int
    time_ns: int


class WindowBounds(NamedTuple):
    """Bounds on the answers of all clients and of one, and how long they are kept."""

    count_max: int
    client_max: int
    kept_ns: int


class AnswerWindows:
    """Answers by request id, the oldest first, and each client's window of them.

    All indexes can be derived from `by_id` in its order.
    """

    def __init__(self, bounds: WindowBounds) -> None:
        self.by_id: Final[dict[RequestId, Answer]] = {}
        self.bounds = bounds
        # The client whose newest answer is the oldest comes first.
        self._windows: OrderedDict[str, deque[Answer]] = OrderedDict()
        # It exists once the bound of all windows was reached.
        self._sizes: WindowSizes | None = None

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self.by_id)

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request has an answer."""
        return request_id in self.by_id

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate over the requests, the oldest answer first."""
        return iter(self.by_id)

    def get(self, request_id: RequestId) -> Answer | None:
        """Return a request's answer, None if it is not kept."""
        return self.by_id.get(request_id)

    def window(self, client: str) -> tuple[RequestId, ...]:
        """Return a client's answered requests, the oldest first."""
        return tuple([answer.reply.request_id for answer in self._windows.get(client, ())])

    def add(self, answer: Answer) -> None:
        """Keep the answer of a request that has none, and drop those beyond the bounds."""
        by_id, windows = self.by_id, self._windows
        count_max, client_max, kept_ns = self.bounds
        request_id = answer.reply.request_id
        client = client_of(request_id)
        by_id[request_id] = answer
        window = windows.get(client)
        if window is None:
            window = windows[client] = deque((answer,))
        else:
            window.append(answer)
        expired_ns = answer.time_ns - kept_ns
        if len(windows) > 1:
            windows.move_to_end(client)
            oldest = next(iter(windows))
            if windows[oldest][0].time_ns <= expired_ns:
                self._drop_expired(oldest, len(windows[oldest]), expired_ns)
        sizes = self._sizes
        if window[0].time_ns <= expired_ns:
            self._drop_expired(client, len(window) - 1, expired_ns)
        elif len(window) > client_max or (
            sizes is not None and len(window) > sizes.largest and len(by_id) > count_max
        ):
            # The hot path of a client with a full window, or with the largest: its size stays.
            del by_id[window.popleft().reply.request_id]
        elif sizes is not None:
            sizes.change(client, len(window) - 1, len(window))
        if len(window) > client_max or len(by_id) > count_max:
            self._drop_beyond_bounds(client)

    def restore(self, answers: Iterable[Answer]) -> None:
        """Put the answers of earlier windows, the oldest first, into empty ones."""
        for answer in answers:
            request_id = answer.reply.request_id
            client = client_of(request_id)
            self.by_id[request_id] = answer
            self._windows.setdefault(client, deque()).append(answer)
            self._windows.move_to_end(client)

    def set_bounds(self, bounds: WindowBounds) -> None:
        """Replace the bounds, and drop the answers beyond the new ones."""
        self.bounds = bounds
        for client in tuple(self._windows):
            self._drop_beyond_bounds(client)

    def _drop_expired(self, client: str, size_before: int, expired_ns: int) -> None:
        """Drop answers for their age; `size_before` is the window's size in `_sizes`."""
        window = self._windows[client]
        for _ in range(_EXPIRED_PER_ANSWER):
            if not window or window[0].time_ns > expired_ns:
                break
            del self.by_id[window.popleft().reply.request_id]
        self._resize(client, size_before, len(window))

    def _drop_beyond_bounds(self, client: str) -> None:
        while len(self._windows.get(client, ())) > self.bounds.client_max:
            self._drop_oldest(client)
        while len(self.by_id) > self.bounds.count_max:
            self._drop_oldest(self._largest_window())

    def _drop_oldest(self, client: str) -> None:
        window = self._windows[client]
        del self.by_id[window.popleft().reply.request_id]
        self._resize(client, len(window) + 1, len(window))

    def _resize(self, client: str, before: int, after: int) -> None:
        if self._sizes is not None and before != after:
            self._sizes.change(client, before, after)
        if not after:
            del self._windows[client]

    def _largest_window(self) -> str:
        """Return the client with the most answers; of several, the first by name."""
        if self._sizes is None:
            self._sizes = WindowSizes((key, len(window)) for key, window in self._windows.items())
        return self._sizes.largest_client()


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
        """Record that a window's size has changed; 0 means that there is none."""
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
