"""Samples for the page: what happened between two readings of the totals."""

import asyncio
from typing import Any

import msgspec
import pytest

from loradock.gateway import rates
from loradock.gateway.rates import Rates
from loradock.gateway.recorder import Recorder
from loradock.messages.requests import StatusShown
from loradock.messages.views import AdapterCounters, EngineStatistics
from tests.support.simulation.message_examples import example_of

STATUS = example_of(StatusShown)


class Controller:
    """Statuses in order, as a follower reads them."""

    def __init__(self, *statuses: StatusShown | None) -> None:
        self._statuses = iter(statuses)

    async def status_now(self, _: float) -> StatusShown | None:
        return next(self._statuses)

    async def notify(self) -> None:
        pass


def status(**fields: Any) -> StatusShown:
    found: StatusShown = msgspec.structs.replace(
        STATUS, **{"counters": AdapterCounters(), "engine": EngineStatistics(), **fields}
    )
    return found


def taken(*statuses: StatusShown | None, waits: tuple[float, ...] = ()) -> Rates:
    """Return the samples of readings; `waits` are first tokens after the first reading."""

    async def take() -> Rates:
        recorder = Recorder()
        controller: Any = Controller(*statuses)
        found = Rates(controller, recorder)
        for number in range(len(statuses)):
            await found.take()
            if number == 0:
                for wait in waits:
                    recorder.first_token.observe(wait)
        return found

    return asyncio.run(take())


def test_a_sample_is_the_growth_of_the_totals() -> None:
    counted = AdapterCounters(
        served=7, output_tokens=90, hits=3, misses=1, loads=2, load_ns=4_000_000_000
    )
    engine = EngineStatistics(steps=4, step_ns=2_000_000_000, kv_bytes=1, kv_bytes_max=4)
    (sample,) = taken(status(), status(counters=counted, engine=engine)).after(0)
    assert (sample.hit_share, sample.load_s, sample.step_s, sample.cache_share) == (
        0.75,
        2.0,
        0.5,
        0.25,
    )
    assert sample.tokens_per_s / sample.requests_per_s == pytest.approx(90 / 7)


def test_without_requests_nothing_is_claimed() -> None:
    (sample,) = taken(status(), status()).after(0)
    assert sample.requests_per_s == 0
    assert (sample.hit_share, sample.load_s, sample.step_s, sample.first_token_p50_s) == (None,) * 4


def test_totals_that_began_again_count_from_zero() -> None:
    before = EngineStatistics(steps=100, step_ns=9_000_000_000)
    after = EngineStatistics(steps=2, step_ns=1_000_000_000)
    (sample,) = taken(status(engine=before), status(engine=after)).after(0)
    assert sample.step_s == 0.5


def test_a_gap_or_a_new_controller_begins_again() -> None:
    assert taken(status(), None, status()).after(0) == []
    assert taken(status(epoch=1), status(epoch=2)).after(0) == []


def test_quantiles_lie_in_their_buckets() -> None:
    (sample,) = taken(status(), status(), waits=(0.3,) * 98 + (3.0,) * 2).after(0)
    assert sample.first_token_p50_s is not None
    assert sample.first_token_p99_s is not None
    assert 0.25 < sample.first_token_p50_s <= 0.5
    assert 2.5 < sample.first_token_p99_s <= 5.0


def test_a_reader_receives_each_sample_once() -> None:
    found = taken(*[status()] * (rates.SAMPLES_MAX + 10))
    assert found.count == rates.SAMPLES_MAX + 9
    assert len(found.after(0)) == rates.SAMPLES_MAX
    assert len(found.after(found.count - 2)) == 2
    assert found.after(found.count) == []
