"""Ranks as threads of one process, for tests of collective operations without models."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.waiting import HANG_S

RANKS = 3


class SharedGroup:
    """A group whose ranks are threads, which exchange values through one dictionary."""

    def __init__(self, rank: int, values: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, RANKS
        self._values, self._barrier = values, barrier

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast_bytes(self, data: bytes) -> bytes:
        return self._exchange(data)[0]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._exchange(data)

    def all_true(self, value: bool) -> bool:
        return all(self._exchange(value))

    def _exchange(self, own_value: Any) -> list[Any]:
        self._values[self.rank] = own_value
        self._barrier.wait(HANG_S)
        exchanged = [self._values[rank] for rank in range(RANKS)]
        self._barrier.wait(HANG_S)
        return exchanged


def on_all_ranks(run_rank: Callable[[SharedGroup], Any]) -> list[Any]:
    """Run a function on every rank, each on a thread; return the results by rank."""
    values: dict[int, Any] = {}
    barrier = threading.Barrier(RANKS)
    groups = [SharedGroup(rank, values, barrier) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run_rank, groups))
