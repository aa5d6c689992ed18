"""Samples of the last fifteen minutes for the page: rates, waits and the use of the engine.

A sample is the difference of two readings of totals that are counted anyway, so requests cost
nothing more.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from loradock.gateway.adapters.follower import Follower
from loradock.gateway.recorder import Recorder, unix_seconds
from loradock.messages.requests import StatusShown

INTERVAL_S: Final = 5.0
SAMPLES_MAX: Final = 180
_NS: Final = 1_000_000_000


class Sample(Struct, frozen=True):
    """What happened in one interval; None where nothing did.

    Durations are means in seconds, except for the quantiles of the time to the first token, which
    are of this gateway's requests. Shares are from 0 to 1.
    """

    time_ms: int
    requests_per_s: float
    tokens_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    running: int
    waiting: int
    hit_share: float | None
    load_s: float | None
    step_s: float | None
    cache_share: float | None


class _Reading(NamedTuple):
    """Totals at one time."""

    seconds: float
    status: StatusShown
    first_token: list[tuple[str, float]]


class Rates:
    """The samples; one is made each `INTERVAL_S` while the controller answers."""

    def __init__(self, follower: Follower, recorder: Recorder) -> None:
        self._follower = follower
        self._recorder = recorder
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._last: _Reading | None = None
        self.count = 0
        """How many samples were made."""

    def after(self, count: int) -> list[Sample]:
        """Return the samples after the first `count`, as far as they are kept."""
        return list(self._samples)[-(self.count - count) :] if count < self.count else []

    async def run(self) -> None:
        """Make samples until the task is cancelled."""
        while True:
            await self.take()
            await asyncio.sleep(INTERVAL_S)

    async def take(self) -> None:
        """Read the totals, and make a sample if there was a reading before it."""
        status = await self._follower.status_now(INTERVAL_S)
        if status is None:
            self._last = None
            return
        reading = _Reading(time.monotonic(), status, self._recorder.first_token.buckets())
        if self._last is not None and self._last.status.epoch == status.epoch:
            self._samples.append(_sample(self._last, reading))
            self.count += 1
            await self._follower.notify()
        self._last = reading


def _sample(before: _Reading, now: _Reading) -> Sample:
    old, new, passed_s = before.status, now.status, now.seconds - before.seconds
    counters, engine = (old.counters, new.counters), (old.engine, new.engine)
    hits, misses = (_grown(name, *counters) for name in ("hits", "misses"))
    waited = [
        (bound, count - earlier)
        for (bound, count), (_, earlier) in zip(now.first_token, before.first_token, strict=True)
    ]
    return Sample(
        time_ms=1000 * unix_seconds(),
        requests_per_s=_grown("served", *counters) / passed_s,
        tokens_per_s=_grown("output_tokens", *counters) / passed_s,
        first_token_p50_s=_quantile(waited, 0.5),
        first_token_p99_s=_quantile(waited, 0.99),
        running=new.running,
        waiting=new.queued + new.waiting,
        hit_share=_ratio(hits, hits + misses),
        load_s=_ratio(_grown("load_ns", *counters) / _NS, _grown("loads", *counters)),
        step_s=_ratio(_grown("step_ns", *engine) / _NS, _grown("steps", *engine)),
        cache_share=_ratio(new.engine.kv_bytes, new.engine.kv_bytes_max),
    )


def _grown(name: str, old: object, new: object) -> float:
    """Return how much a total grew; one that began again counts from 0."""
    before, now = getattr(old, name), getattr(new, name)
    return float(now - before if now >= before else now)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _quantile(cumulative: Sequence[tuple[str, float]], part: float) -> float | None:
    """Return a quantile of the observations in buckets, linear within a bucket.

    As Prometheus' `histogram_quantile`, observations above the last finite bound count as that.
    """
    total = cumulative[-1][1]
    if not total:
        return None
    low, below = 0.0, 0.0
    for bound, count in cumulative[:-1]:
        if count >= part * total:
            return low + (float(bound) - low) * (part * total - below) / (count - below)
        low, below = float(bound), count
    return low
