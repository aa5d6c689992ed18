"""Ages of the pending requests, and the slowest operations and requests of the last hour.

It measures with a monotonic clock of its own, and nothing of it is logged or decides anything.
"""

import heapq
from collections.abc import Container, Iterator
from itertools import count
from typing import Final, NamedTuple

from msgspec import Struct

from loradock.messages.control import RequestView, SlowView
from loradock.messages.ids import OpId, RequestId

SLOW_MAX: Final = 32
"""The most operations, and the most requests, that are kept as slow ones."""

SLOW_KEPT_NS: Final = 3_600_000_000_000
"""How long they are kept."""

_NS_PER_MS: Final = 1_000_000


class Slow(NamedTuple):
    """Something that has ended, with its duration and its end (monotonic)."""

    duration_ns: int
    number: int
    ended_ns: int
    kind: str
    adapter: str
    outcome: str


class SlowestTable:
    """The slowest of what ended within the last hour."""

    def __init__(self) -> None:
        self._heap: list[Slow] = []
        self._numbers = count()

    def add(self, now_ns: int, duration_ns: int, kind: str, adapter: str, outcome: str) -> None:
        """Keep it, if it is among the slowest."""
        if not self.accepts(now_ns, duration_ns):
            return
        if len(self._heap) >= SLOW_MAX:
            self._drop_old(now_ns)
        slow = Slow(duration_ns, next(self._numbers), now_ns, kind, adapter, outcome)
        if len(self._heap) < SLOW_MAX:
            heapq.heappush(self._heap, slow)
        else:
            heapq.heappushpop(self._heap, slow)

    def accepts(self, now_ns: int, duration_ns: int) -> bool:
        """Whether something of this duration is kept."""
        if len(self._heap) < SLOW_MAX:
            return True
        shortest = self._heap[0]
        return duration_ns > shortest.duration_ns or shortest.ended_ns <= now_ns - SLOW_KEPT_NS

    def views(self, now_ns: int) -> tuple[SlowView, ...]:
        """Return them, the slowest first."""
        self._drop_old(now_ns)
        return tuple(
            SlowView(
                slow.kind,
                slow.adapter,
                slow.duration_ns // _NS_PER_MS,
                (now_ns - slow.ended_ns) // _NS_PER_MS,
                slow.outcome,
            )
            for slow in sorted(self._heap, reverse=True)
        )

    def _drop_old(self, now_ns: int) -> None:
        self._heap = [slow for slow in self._heap if slow.ended_ns > now_ns - SLOW_KEPT_NS]
        heapq.heapify(self._heap)


class _Running(Struct, gc=False):
    """A request or an operation that has not ended; `tokens` are those sent so far."""

    kind: str
    adapter: str
    since_ns: int
    tokens: int = 0


class RequestTimes:
    """What is in progress, since when, and what has ended slowly."""

    def __init__(self, now_ns: int) -> None:
        """`now_ns`: the start of this process, since when earlier requests are counted."""
        self._started_ns = now_ns
        # For reading only outside of this class.
        self.requests: Final[dict[RequestId, _Running]] = {}
        self._operations: dict[OpId, _Running] = {}
        self._slow_requests = SlowestTable()
        self._slow_operations = SlowestTable()

    def begin_request(self, request_id: RequestId, kind: str, adapter: str, now_ns: int) -> None:
        """Note a request; a repetition changes nothing."""
        if request_id not in self.requests:
            self.requests[request_id] = _Running(kind, adapter, now_ns)

    def count_tokens(self, request_id: RequestId, tokens: int) -> None:
        """Note how many tokens of a generation have been sent."""
        running = self.requests.get(request_id)
        if running is not None:
            running.tokens = max(running.tokens, tokens)

    def end_request(self, request_id: RequestId, outcome: str, now_ns: int) -> None:
        """Note the answer to a request."""
        running = self.requests.pop(request_id, None)
        if running is not None:
            self._slow_requests.add(
                now_ns, now_ns - running.since_ns, running.kind, running.adapter, outcome
            )

    def is_slow_request(self, now_ns: int, duration_ns: int) -> bool:
        """Whether a request of this duration would be among the slowest."""
        return self._slow_requests.accepts(now_ns, duration_ns)

    def begin_operation(self, op: OpId, kind: str, adapter: str, now_ns: int) -> None:
        """Note a command to the engine."""
        self._operations[op] = _Running(kind, adapter, now_ns)

    def end_operation(self, op: OpId, outcome: str, now_ns: int) -> None:
        """Note the engine's report."""
        running = self._operations.pop(op, None)
        if running is not None:
            self._slow_operations.add(
                now_ns, now_ns - running.since_ns, running.kind, running.adapter, outcome
            )

    def keep_operations(self, running: Container[OpId]) -> None:
        """Forget all operations but those that the engine runs: the others have no report."""
        self._operations = {op: one for op, one in self._operations.items() if op in running}

    def slow_operations(self, now_ns: int) -> tuple[SlowView, ...]:
        """Return the slowest operations."""
        return self._slow_operations.views(now_ns)

    def slow_requests(self, now_ns: int) -> tuple[SlowView, ...]:
        """Return the slowest requests."""
        return self._slow_requests.views(now_ns)

    def views(
        self, pending: Iterator[tuple[RequestId, str, str, bool]], now_ns: int
    ) -> tuple[RequestView, ...]:
        """Return pending requests: of each its id, kind, adapter and whether it runs."""
        return tuple(
            RequestView(
                request_id,
                kind,
                adapter,
                "running" if runs else "waiting",
                (now_ns - self._since(request_id)) // _NS_PER_MS,
                self.requests[request_id].tokens if request_id in self.requests else 0,
            )
            for request_id, kind, adapter, runs in pending
        )

    def _since(self, request_id: RequestId) -> int:
        running = self.requests.get(request_id)
        return self._started_ns if running is None else running.since_ns
