"""How many threads a product gets.

What it is: one number of rows, and a way to stay on one thread. What it is not: a pool. One rule:
the number of threads is what it was when the products are done, whatever happens in between.

Waking a second thread costs more than it saves where a product has few rows: on two cores, a decode
step of 16 rows over 8 adapters took 165 ms on two threads and 84 ms with its deltas on one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

THREADED_ROWS: Final = 256
"""From so many rows in one product on, more than one thread is worth its waking."""


@contextmanager
def threads_for(rows: int) -> Iterator[None]:
    """One thread for products of at most `rows` rows, unless that is many; then as many as are set.

    What other threads of this process compute meanwhile may get one thread too, never a wrong
    result.
    """
    threads = torch.get_num_threads()
    if threads == 1 or rows >= THREADED_ROWS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
