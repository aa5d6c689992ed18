"""Adapters that are loaded at the start, however late the engine comes."""

import os
from pathlib import Path

import msgspec

from messages import requests as rq
from messages.control import PRELOAD, StopServer
from messages.errors import ErrorCode
from tests.support.parallel.processes import LIMITS, controller
from tests.support.simulation.shell_examples import RawClient, StandInEngine, eventually, logged

PRELOADS = (("one", "a/b"), ("two", "two"))


def preloads_of(directory: Path) -> list[rq.LoadAdapter]:
    found = (m for m in logged(directory) if isinstance(m, rq.LoadAdapter))
    return [one for one in found if one.request_id.startswith(PRELOAD)]


def test_they_wait_longer_than_a_request_for_an_engine_that_loads_its_model(
    directory: Path,
) -> None:
    limits = msgspec.structs.replace(LIMITS, request_timeout_ms=1)
    with controller(directory, limits=limits, preloads=PRELOADS), RawClient(directory) as client:
        # The time of requests without one of their own has passed.
        assert client.load("three").code is ErrorCode.ENGINE_GONE
        with StandInEngine(directory, "e", os.getpid()):
            eventually(lambda: {"one", "two"} == {v.adapter for v in client.list().adapters})
            eventually(lambda: {v.state for v in client.list().adapters} == {"cpu-cached"})


def test_a_server_that_is_started_again_without_an_engine_adds_none(directory: Path) -> None:
    with controller(directory, preloads=PRELOADS) as process, RawClient(directory) as client:
        for _ in range(3):
            assert client.status().requests == len(PRELOADS)
            process.kill()
            process.start()
        assert len(preloads_of(directory)) == len(PRELOADS)


def test_a_stop_does_not_wait_for_them(directory: Path) -> None:
    with controller(directory, preloads=PRELOADS) as process, RawClient(directory) as client:
        assert client.status().requests == len(PRELOADS)
        client.send_request(StopServer("s", 3_600_000))
        assert process.wait() == 0
    assert len(preloads_of(directory)) == len(PRELOADS)
