"""Links between simulated processes: frames arrive late, in another order, twice or never."""

import random
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from tests.support.campaign.machine import MACHINE, MS

Schedule = Callable[[int, Callable[[], None]], None]
"""Runs a function after a delay in nanoseconds."""

LATENCY_NS: Final = MS // 10


class LinkFaults(Struct):
    """Probabilities per frame; `spread_ns` bounds the additional latency."""

    loss: float = 0.0
    duplication: float = 0.0
    spread_ns: int = MS // 5


class Link:
    """One direction between two processes.

    An `ordered` link is one connection: no frame overtakes an earlier one, as on a stream socket.
    Frames of another link arrive in any order.
    """

    def __init__(
        self,
        schedule: Schedule,
        rng: random.Random,
        deliver: Callable[[bytes], None],
        *,
        ordered: bool,
    ) -> None:
        self.faults = LinkFaults()
        self.is_partitioned = False
        self._schedule = schedule
        self._rng = rng
        self._deliver = deliver
        self._ordered: Final = ordered
        self._connection = 0
        self._delay_ns = 0
        self._last_arrival_ns = 0

    def send(self, frame: bytes) -> None:
        faults = self.faults
        if self.is_partitioned or (faults.loss and self._rng.random() < faults.loss):
            return
        self._send_once(frame)
        if faults.duplication and self._rng.random() < faults.duplication:
            self._send_once(frame)

    def cut(self) -> None:
        """End the connection: what is in flight is lost."""
        self._connection += 1

    def delay(self, delay_ns: int) -> None:
        """Delay what is in flight, so that it may arrive after frames of a later connection."""
        self._delay_ns = delay_ns

    def _send_once(self, frame: bytes) -> None:
        arrival = MACHINE.now_ns + LATENCY_NS + int(self._rng.random() * self.faults.spread_ns)
        if self._ordered:
            arrival = self._last_arrival_ns = max(self._last_arrival_ns, arrival)
        connection = self._connection

        def arrive() -> None:
            if self._delay_ns:
                self._schedule(self._delay_ns, deliver)
            else:
                deliver()

        def deliver() -> None:
            if connection == self._connection:
                self._deliver(frame)

        self._schedule(arrival - MACHINE.now_ns, arrive)
