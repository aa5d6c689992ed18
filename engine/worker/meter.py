"""Statistics of an engine: steps, phases of requests and tokens, measured outside its scheduler."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set

import msgspec

from loradock.messages.ids import OpId, RequestId
from loradock.messages.reports import GenerationEnded, OperationFailed, PoolingEnded, Report
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import (
    DURATION_BOUNDS_S,
    PREEMPTION_BOUNDS,
    TOKEN_BOUNDS,
    Distribution,
    EngineStatistics,
)

_DURATION_BOUNDS_NS = tuple(int(bound * 1e9) for bound in DURATION_BOUNDS_S)


class Observations:
    """A distribution that grows; `bounds` are inclusive upper bounds, ascending."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0

    def add(self, value: int) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def shown(self) -> Distribution:
        """Return the values until now."""
        return Distribution(self._total, tuple(self._counts))


class _Request:
    """The times and preemptions of a request that has not ended; times are None before theirs."""

    def __init__(self, request_id: RequestId, arrived_ns: int) -> None:
        self.request_id = request_id
        self.arrived_ns = arrived_ns
        self.began_ns: int | None = None
        self.first_token_ns: int | None = None
        self.preemptions = 0
        self.is_paused = False


class Meter:
    """Counters since the start; durations in nanoseconds of `clock`.

    A request is queued from `arrived` until the beginning of the first step that it takes part in.
    Tokens are counted when their request ends, as in the controller's counters.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._requests: dict[OpId, _Request] = {}
        # Those that wait for their first token.
        self._first_tokens: dict[RequestId, _Request] = {}
        self._step_began_ns = clock()
        self._steps = self._step_ns = 0
        self._prompt_tokens = self._output_tokens = 0
        self._prefix_queries = self._prefix_hits = 0
        self._preempted = 0
        self._queue = Observations(_DURATION_BOUNDS_NS)
        self._prefill = Observations(_DURATION_BOUNDS_NS)
        self._decode = Observations(_DURATION_BOUNDS_NS)
        self._inference = Observations(_DURATION_BOUNDS_NS)
        self._preemptions = Observations(PREEMPTION_BOUNDS)
        self._computed_tokens = Observations(TOKEN_BOUNDS)

    def arrived(self, op: OpId, request_id: RequestId) -> None:
        """Record the arrival of a request."""
        request = _Request(request_id, self._clock())
        self._requests[op] = self._first_tokens[request_id] = request

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._step_began_ns = self._clock()

    def end_step(self, running: Set[OpId], waiting: Iterable[OpId]) -> None:
        """Record that it has ended; `running` takes part in the next one, `waiting` does not."""
        self._steps += 1
        self._step_ns += self._clock() - self._step_began_ns
        for op in self._requests.keys() & running:
            self._begin(self._requests[op])
            self._requests[op].is_paused = False
        # Those that have ended are in neither: their reports follow.
        for op in self._requests.keys() & set(waiting):
            self._pause(self._requests[op])

    def on_report(self, report: Report) -> Report:
        """Record the first token or the end of a request; other reports are ignored.

        Return the report; that of a generation's end with the time of the first token.
        """
        match report:
            case TokensStreamed(request_id):
                request = self._first_tokens.pop(request_id, None)
                if request is not None:
                    request.first_token_ns = self._clock()
            case GenerationEnded(op, "cancelled", output_tokens=0):
                # It may not have begun, and which part of its prompt was computed is not known.
                self._forget(op)
            case GenerationEnded(op):
                self._prompt_tokens += report.prompt_tokens - report.prefix_tokens
                self._output_tokens += report.output_tokens
                self._prefix_queries += report.prompt_tokens
                self._prefix_hits += report.prefix_tokens
                return self._end_generation(self._end(op), report)
            case PoolingEnded(op):
                self._prompt_tokens += report.input_tokens
                self._end(op)
            case OperationFailed(op):
                self._forget(op)
        return report

    def statistics(self, running: int, waiting: int) -> EngineStatistics:
        """Return what was measured; the caller adds the memory."""
        queue = self._queue.shown()
        return EngineStatistics(
            steps=self._steps,
            step_ns=self._step_ns,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            waiting=waiting,
            running=running,
            preempted=self._preempted,
            queued=sum(queue.counts),
            queue_ns=queue.total,
            queue_counts=queue.counts,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prefill=self._prefill.shown(),
            decode=self._decode.shown(),
            inference=self._inference.shown(),
            preemptions=self._preemptions.shown(),
            computed_tokens=self._computed_tokens.shown(),
        )

    def _begin(self, request: _Request) -> None:
        if request.began_ns is None:
            request.began_ns = self._step_began_ns
            self._queue.add(max(0, self._step_began_ns - request.arrived_ns))

    def _pause(self, request: _Request) -> None:
        if request.began_ns is not None and not request.is_paused:
            request.is_paused = True
            request.preemptions += 1
            self._preempted += 1

    def _end(self, op: OpId) -> _Request | None:
        """Forget a request that was served; one that took part in one step began in the last."""
        request = self._forget(op)
        if request is not None:
            self._begin(request)
        return request

    def _forget(self, op: OpId) -> _Request | None:
        request = self._requests.pop(op, None)
        # A later request may have the same id.
        if request is not None and self._first_tokens.get(request.request_id) is request:
            del self._first_tokens[request.request_id]
        return request

    def _end_generation(self, request: _Request | None, report: GenerationEnded) -> GenerationEnded:
        if request is None or request.began_ns is None:
            return report
        now = self._clock()
        first_ns = now if request.first_token_ns is None else request.first_token_ns
        self._prefill.add(max(0, first_ns - request.began_ns))
        self._decode.add(now - first_ns)
        self._inference.add(max(0, now - request.began_ns))
        self._preemptions.add(request.preemptions)
        self._computed_tokens.add(report.prompt_tokens - report.prefix_tokens)
        if not report.output_tokens:
            return report
        return msgspec.structs.replace(report, first_token_ns=first_ns - request.arrived_ns)
