"""The number of threads for a matrix product, chosen by its rows.

Waking a second thread costs more than it saves for products of few rows: on two cores, a decode
step of 16 rows over 8 adapters took 165 ms on two threads and 84 ms with its deltas on one.
"""

from types import TracebackType
from typing import Final

import torch

THREADED_ROWS: Final = 256
"""The least rows of a product that is computed on more than one thread."""


class threads_for:  # noqa: N801  # it is used as a function is, and a generator's takes 2 us
    """Context manager that limits products of fewer than `THREADED_ROWS` rows to one thread.

    The previous number of threads is restored on exit, also after an error. PyTorch's setting is
    each thread's own, but a thread that computes for the first time within the context begins with
    one thread too, and keeps it; that affects its speed only.
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
