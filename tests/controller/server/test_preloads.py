"""Adapters that are loaded at the start, however late the engine comes."""

import os
import resource
import subprocess
from pathlib import Path

import msgspec

from loradock.controller.server.config import ServerConfig
from loradock.controller.server.preloads import preload_requests, waiting_preloads
from loradock.messages import records
from loradock.messages import requests as rq
from loradock.messages.control import PRELOAD, StopServer
from loradock.messages.errors import ErrorCode
from loradock.processes.subprocesses import process_command
from tests.support.parallel.processes import LIMITS, ControllerProcess, controller
from tests.support.simulation.core_bench import CoreBench
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


def test_one_without_a_path_waits_for_the_known_path(directory: Path) -> None:
    process = ControllerProcess(directory, preloads=(("a", ""),))
    with controller(directory), RawClient(directory) as client:
        client.send_request(rq.LoadAdapter("r", "a", "p"))
        eventually(lambda: client.status().requests == 1)
    for _ in range(3):
        process.start()
        with RawClient(directory) as client:
            assert client.status().requests == 2
        process.kill()
    assert len(preloads_of(directory)) == 1


def test_one_that_may_end_before_the_engine_comes_is_requested_again() -> None:
    bench = CoreBench(engine=False)
    for request in preload_requests(PRELOADS):
        bench.handle(request)
    assert preload_requests(PRELOADS, waiting_preloads(bench.world)) == []
    bench.advance(1_900_000)
    bench.handle(records.TimerFired())
    again = preload_requests((PRELOADS[1],), waiting_preloads(bench.world))
    assert [(one.adapter, one.path) for one in again] == [PRELOADS[1]]
    bench.handle(again[0])
    # The first one ends, and the adapter is waited for by the second.
    bench.advance(1_800_000)
    assert list(bench.world.pending_requests) == [again[0].request_id]


def test_a_full_disk_at_the_start_delays_them(directory: Path) -> None:
    preloads = (("one", "p" * 3000), ("two", "p" * 3000))
    config = msgspec.json.encode(ServerConfig(str(directory), LIMITS, preloads=preloads)).decode()
    # Room for the log's header, and not for them: some shells count in blocks of 512 bytes.
    start = ("sh", "-c", 'ulimit -S -f 4; exec "$@"', "sh", *process_command("controller"), config)
    with subprocess.Popen(start) as process, RawClient(directory) as client:
        try:
            assert client.load("other").code is ErrorCode.LOG_UNAVAILABLE
            assert client.status().requests == 0
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            eventually(lambda: client.status().requests == len(preloads))
        finally:
            process.kill()


def test_a_stop_does_not_wait_for_them(directory: Path) -> None:
    with controller(directory, preloads=PRELOADS) as process, RawClient(directory) as client:
        assert client.status().requests == len(PRELOADS)
        client.send_request(StopServer("s", 3_600_000))
        assert process.wait() == 0
    assert len(preloads_of(directory)) == len(PRELOADS)
