"""Prompts with images, long texts and structures, processed by jobs while others generate.

Prompts start in the order of their requests. At most `PREFETCHED_MAX` are processed ahead of the
batch, because pixels take far more memory than the files that they come from.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from loradock.engine.inference.sequence import PreparedPrompt, Sequence
from loradock.engine.jobs import Jobs
from loradock.messages.ids import OpId

PREFETCHED_MAX: Final = 8
"""The most prompts that are processed, or being processed, and not yet in the batch."""


class PromptPrefetcher:
    """Sequences whose prompts wait for a job; used by one thread, which calls `collect` often.

    `ready`, in its methods: the number of processed sequences that are not yet in the batch.
    """

    def __init__(self, jobs: Jobs[OpId]) -> None:
        self._jobs = jobs
        self._queue: deque[tuple[Sequence, Callable[[], PreparedPrompt]]] = deque()
        # The job of a cancelled sequence counts until it has ended; its value is None.
        self._running: dict[OpId, Sequence | None] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running, the end of which only `collect` reports."""
        return bool(self._running)

    def add(self, sequence: Sequence, read: Callable[[], PreparedPrompt], ready: int) -> None:
        """Queue a sequence, whose prompt is the result of `read`."""
        self._queue.append((sequence, read))
        self._start_jobs(ready)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; a running job continues and its result is ignored."""
        if sequence.command.op in self._running:
            self._running[sequence.command.op] = None
        else:
            self._queue = deque(entry for entry in self._queue if entry[0] is not sequence)

    def collect(self, ready: int) -> list[tuple[Sequence, "Future[Any]"]]:
        """Return the sequences whose jobs have ended since the last call, and start more jobs."""
        ended = [(self._running.pop(op), future) for op, future in self._jobs.take_finished()]
        wanted = [(sequence, future) for sequence, future in ended if sequence is not None]
        self._start_jobs(ready + len(wanted))
        return wanted

    def close(self) -> None:
        """Start no more jobs."""
        self._jobs.close()

    def _start_jobs(self, ready: int) -> None:
        while self._queue and ready + len(self._running) < PREFETCHED_MAX:
            sequence, read = self._queue.popleft()
            self._running[sequence.command.op] = sequence
            self._jobs.start(sequence.command.op, read)
