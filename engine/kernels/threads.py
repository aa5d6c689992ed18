"""How many threads a product gets.

What it is: one number of rows, and a way to stay on one thread. What it is not: a pool. One rule:
the number of threads is what it was when the products are done, whatever happens in between.

Waking a second thread costs more than it saves where a product has few rows: on two cores, a decode
step of 16 rows over 8 adapters took 165 ms on two threads and 84 ms with its deltas on one.
"""

from types import TracebackType
from typing import Final

import torch

THREADED_ROWS: Final = 256
"""From so many rows in one product on, more than one thread is worth its waking."""


class threads_for:  # noqa: N801  # it is used as a function is, and a generator's takes 2 us
    """One thread for products of at most `rows` rows, unless that is many; then as many as are set.

    What other threads of this process compute meanwhile may get one thread too, never a wrong
    result.
    """

    __slots__ = ("_before", "_rows")

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._before = 1

    def __enter__(self) -> None:
        if self._rows < THREADED_ROWS:
            self._before = torch.get_num_threads()
            if self._before > 1:
                torch.set_num_threads(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before > 1:
            torch.set_num_threads(self._before)
