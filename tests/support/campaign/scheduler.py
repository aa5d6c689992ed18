"""The order of everything that happens in a schedule, and its trace."""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Final

import xxhash

from tests.support.campaign.machine import MACHINE

Action = Callable[[], None]


class Scheduler:
    """Actions at times of the simulated machine; `rng` makes every choice of a schedule.

    Two runs of one seed have the same trace: a hash over all that was sent, written and done.
    """

    def __init__(self, seed: int) -> None:
        self.rng: Final = random.Random(seed)
        self._queue: list[tuple[int, int, Action]] = []
        self._numbers = itertools.count()
        self._trace = xxhash.xxh3_64()
        self.log: list[str] | None = None
        """A readable trace, if it is a list."""

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()

    def note(self, what: str, data: bytes = b"") -> None:
        """Add an occurrence to the trace."""
        self._trace.update(b"%d %s %b;" % (MACHINE.now_ns, what.encode(), data))
        if self.log is not None:
            self.log.append(f"{MACHINE.now_ns / 1e9:.6f} {what} {data[:200]!r}")

    def after(self, delay_ns: int, action: Action) -> None:
        """Run `action` after a delay."""
        heapq.heappush(self._queue, (MACHINE.now_ns + delay_ns, next(self._numbers), action))

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._queue:
            return False
        at_ns, _, action = heapq.heappop(self._queue)
        # A slow disk may have let more time pass.
        MACHINE.now_ns = max(MACHINE.now_ns, at_ns)
        action()
        return True


class Wakeup:
    """The next iteration of a process's main loop: the earliest of the times requested."""

    def __init__(self, scheduler: Scheduler, iterate: Action) -> None:
        self._scheduler = scheduler
        self._iterate = iterate
        self._at_ns = -1
        self._held_until_ns = 0

    def request(self, delay_ns: int) -> None:
        """Iterate after a delay, if no earlier iteration is due."""
        at_ns = max(MACHINE.now_ns + delay_ns, self._held_until_ns)
        if 0 <= self._at_ns <= at_ns:
            return
        self._at_ns = at_ns

        def run() -> None:
            if self._at_ns == at_ns:
                self._at_ns = -1
                self._iterate()

        self._scheduler.after(at_ns - MACHINE.now_ns, run)

    def hold(self, duration_ns: int) -> None:
        """Stop the process for some time, as SIGSTOP and SIGCONT do."""
        self._held_until_ns = MACHINE.now_ns + duration_ns
        self._at_ns = -1
        self.request(0)

    def resume(self) -> None:
        """Let a stopped process continue."""
        if self._held_until_ns > MACHINE.now_ns:
            self._held_until_ns = 0
            self._at_ns = -1
            self.request(0)

    def end(self) -> None:
        """Cancel the next iteration: the process has ended."""
        self._at_ns = -1
        self._held_until_ns = 0
