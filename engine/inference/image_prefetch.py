"""Prompts with images on their way to what a model reads, while others generate.

What it is: a line of rows whose images other threads decode and scale, some at a time. What it is
not: the reading (`engine.processor`). One rule: rows are read in the order in which they came, and
no more than `AHEAD_MAX` are read before they are in the batch, for pixels take far more memory than
the files that they come from.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from engine.inference.sequence import Row
from engine.jobs import Jobs
from engine.models.image_processor import Reading
from messages.ids import OpId

AHEAD_MAX: Final = 8
"""How many prompts with images may be read, or be about to be, and not in the batch yet."""


class PromptJobs:
    """Rows that wait to be read; driven by one thread, which calls `take` now and then.

    `unused`, in its methods: how many rows were read and are not in the batch yet.
    """

    def __init__(self, jobs: Jobs[OpId]) -> None:
        self._jobs = jobs
        self._line: deque[tuple[Row, Callable[[], Reading]]] = deque()
        # What is read for nobody any more has its place until it is there.
        self._running: dict[OpId, Row | None] = {}

    def __len__(self) -> int:
        return len(self._line) + len(self._running)

    @property
    def is_busy(self) -> bool:
        """Whether something is being read, whose end only `take` sees."""
        return bool(self._running)

    def add(self, row: Row, read: Callable[[], Reading], unused: int) -> None:
        """Have a row read, after those before it."""
        self._line.append((row, read))
        self._start(unused)

    def drop(self, row: Row) -> None:
        """Have a row read no more."""
        if row.command.op in self._running:
            self._running[row.command.op] = None
        else:
            self._line = deque(pair for pair in self._line if pair[0] is not row)

    def take(self, unused: int) -> list[tuple[Row, "Future[Any]"]]:
        """The rows whose reading has ended since the last call, well or not; others begin."""
        ended = [(self._running.pop(op), future) for op, future in self._jobs.take()]
        wanted = [(row, future) for row, future in ended if row is not None]
        self._start(unused + len(wanted))
        return wanted

    def close(self) -> None:
        """Read nothing more."""
        self._jobs.close()

    def _start(self, unused: int) -> None:
        while self._line and unused + len(self._running) < AHEAD_MAX:
            row, read = self._line.popleft()
            self._running[row.command.op] = row
            self._jobs.start(row.command.op, read)
