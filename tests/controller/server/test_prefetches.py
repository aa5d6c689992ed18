"""Prefetches of `--prefetch-history`: logged as requests of the server's own."""

import os
from pathlib import Path

from loradock.controller.log.replay import replay
from loradock.messages import requests as rq
from tests.support.simulation.shell_examples import StandInEngine, eventually, logged
from tests.support.simulation.stepped_clocks import RequestClient, SteppedClocks, serving


def prefetches(directory: Path) -> list[rq.PrefetchAdapter]:
    return [one for one in logged(directory) if isinstance(one, rq.PrefetchAdapter)]


def use(client: RequestClient, clocks: SteppedClocks, times: int) -> None:
    """Use an adapter once a minute, and evict it after most of the minute."""
    for _ in range(times):
        client.call(rq.Generate(client.new_id(), "job", "hello"))
        clocks.advance(58_900)
        client.call(rq.EvictAdapter(client.new_id(), "job"))
        clocks.advance(1_100)


def test_an_adapter_of_even_intervals_is_prefetched_a_second_before(tmp_path: Path) -> None:
    clocks = SteppedClocks()
    with (
        serving(tmp_path, clocks.clocks, prefetch_history=True) as client,
        StandInEngine(tmp_path, "e", os.getpid()),
    ):
        eventually(lambda: client.status().engine_id == "e")
        client.load("job")
        use(client, clocks, 3)
        assert prefetches(tmp_path) == []
        use(client, clocks, 1)
        eventually(lambda: client.list().adapters[0].state == "gpu-slot")
        assert [one.adapter for one in prefetches(tmp_path)] == ["job"]
        assert client.status().counters.prefetches == 1
    assert replay(tmp_path / "log").divergence is None


def test_it_is_an_option(tmp_path: Path) -> None:
    clocks = SteppedClocks()
    with (
        serving(tmp_path, clocks.clocks) as client,
        StandInEngine(tmp_path, "e", os.getpid()),
    ):
        eventually(lambda: client.status().engine_id == "e")
        client.load("job")
        use(client, clocks, 5)
        client.answers()
    assert prefetches(tmp_path) == []
