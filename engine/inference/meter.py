"""Statistics of an engine: steps, queue times and tokens, measured outside of its scheduler."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Set

from messages.ids import OpId
from messages.reports import GenerationEnded, OperationFailed, PoolingEnded, Report
from messages.views import QUEUE_BOUNDS_S, EngineStatistics


class Meter:
    """Counters since the start; durations in nanoseconds of `clock`.

    A request is queued from `arrived` until the beginning of the first step that it takes part in.
    Tokens are counted when their request ends, as in the controller's counters.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._arrived_ns: dict[OpId, int] = {}
        self._begun: set[OpId] = set()
        self._paused: set[OpId] = set()
        self._step_began_ns = clock()
        self._steps = self._step_ns = 0
        self._prompt_tokens = self._output_tokens = 0
        self._preempted = 0
        self._queue_ns = 0
        self._queue_counts = [0] * (len(QUEUE_BOUNDS_S) + 1)

    def arrived(self, op: OpId) -> None:
        """Record the arrival of a request."""
        self._arrived_ns[op] = self._clock()

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._step_began_ns = self._clock()

    def end_step(self, running: Set[OpId], waiting: Iterable[OpId]) -> None:
        """Record that it has ended; `running` takes part in the next one, `waiting` does not."""
        self._steps += 1
        self._step_ns += self._clock() - self._step_began_ns
        for op in self._arrived_ns.keys() & running:
            self._begin(op)
        # Those that have ended are in neither: their reports follow.
        paused = self._begun & set(waiting)
        self._preempted += len(paused - self._paused)
        self._paused = paused

    def on_report(self, report: Report) -> None:
        """Record the end of a request; other reports are ignored."""
        match report:
            case GenerationEnded(op):
                self._prompt_tokens += report.prompt_tokens - report.prefix_tokens
                self._output_tokens += report.output_tokens
            case PoolingEnded(op):
                self._prompt_tokens += report.input_tokens
            case OperationFailed(op):
                pass
            case _:
                return
        # It began in the last step, or it ended without one.
        if op in self._arrived_ns and not isinstance(report, OperationFailed):
            self._begin(op)
        self._arrived_ns.pop(op, None)
        self._begun.discard(op)
        self._paused.discard(op)

    def statistics(self, running: int, waiting: int) -> EngineStatistics:
        """Return what was measured; the caller adds the memory."""
        return EngineStatistics(
            steps=self._steps,
            step_ns=self._step_ns,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            waiting=waiting,
            running=running,
            preempted=self._preempted,
            queued=sum(self._queue_counts),
            queue_ns=self._queue_ns,
            queue_counts=tuple(self._queue_counts),
        )

    def _begin(self, op: OpId) -> None:
        queued_ns = max(0, self._step_began_ns - self._arrived_ns.pop(op))
        self._queue_ns += queued_ns
        self._queue_counts[bisect_left(QUEUE_BOUNDS_S, queued_ns / 1e9)] += 1
        self._begun.add(op)
