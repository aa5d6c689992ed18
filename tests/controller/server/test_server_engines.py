"""A real controller process, with engines that start, end, fall silent and report nonsense.

The engines are stand-ins; the process that the controller watches is one that sleeps.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.controller.log.replay import replay
from loradock.messages import commands, events, records, reports
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT
from loradock.messages.views import AdapterCounters, EngineStatistics
from loradock.messages.wire import COMMANDS, REPORTS
from tests.support.parallel.processes import LIMITS, ControllerProcess, controller
from tests.support.simulation.shell_examples import (
    Peer,
    RawClient,
    StandInEngine,
    eventually,
    logged,
    set_file_limit,
)

LIVE_MS = 60_000
"""The time after which a silent engine counts as lost: no stand-in is silent for so long."""

SILENT_MS = 3_000
"""The same where a test load for it; a stand-in beats thirty times as often."""

after_silence = pytest.mark.parametrize("process", [SILENT_MS], indirect=True)


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def process(directory: Path, request: pytest.FixtureRequest) -> Iterator[ControllerProcess]:
    timeout_ms = getattr(request, "param", LIVE_MS)
    options: dict[str, Any] = {"checked": True, "engine_timeout_ms": timeout_ms}
    with controller(directory, **options) as found:
        yield found
        assert found.stop() == 0, found.output()
    result = replay(directory / "log", checked=True)
    assert result.divergence is None


@pytest.fixture
def client(directory: Path, process: ControllerProcess) -> Iterator[RawClient]:
    with RawClient(directory) as found:
        yield found


def states(client: RawClient) -> dict[str, str]:
    return {view.adapter: view.state for view in client.list().adapters}


def losses(directory: Path) -> list[str]:
    return [m.engine_id for m in logged(directory) if isinstance(m, records.EngineLost)]


def wait_until_attached(client: RawClient, engine_id: str) -> None:
    eventually(lambda: client.status().engine_id == engine_id, engine_id)


def test_a_dead_engine_is_detected_and_the_next_one_gets_its_goals(
    directory: Path, client: RawClient
) -> None:
    with sleeper() as first, StandInEngine(directory, "first", first.pid) as engine:
        assert client.call(rq.HoldAdapter(client.new_id(), "held")).state == GPU_SLOT
        assert client.activate("used").state == GPU_SLOT
        engine.delayed = {commands.CheckAdapter, commands.StartGeneration}
        load = rq.LoadAdapter(client.new_id(), "waits")
        generation = rq.Generate(client.new_id(), "used", "hello")
        client.send_request(load)
        client.send_request(generation)
        eventually(lambda: len(engine.running) == 2)
        # An ended process receives nothing, so the stand-in stops first.
        engine.paused = True
        first.kill()
        for request in (load, generation):
            assert client.final_reply(request.request_id).code == ErrorCode.ENGINE_GONE
        assert client.status().engine_id == ""
        assert states(client) == {"held": "evicted", "used": "evicted"}
    with sleeper() as second, StandInEngine(directory, "second", second.pid):
        wait_until_attached(client, "second")
        eventually(lambda: states(client)["held"] == GPU_SLOT, "the held adapter")
        assert client.activate("used").state == GPU_SLOT
    assert losses(directory)[0] == "first"


def test_frames_of_a_dead_engine_change_nothing(directory: Path, client: RawClient) -> None:
    with sleeper() as watched, StandInEngine(directory, "first", watched.pid) as engine:
        assert client.load("a").state == "cpu-cached"
        watched.kill()
        eventually(lambda: client.status().engine_id == "", "the loss")
        # The stand-in still sends heartbeats, like frames that were in flight.
        with sleeper() as other, StandInEngine(directory, "second", other.pid):
            wait_until_attached(client, "second")
            assert client.load("a").state == "cpu-cached"
            assert engine.engine_id not in losses(directory)[1:]


@after_silence
def test_a_silent_engine_is_lost_and_attached_again(directory: Path, client: RawClient) -> None:
    with sleeper() as watched, StandInEngine(directory, "e", watched.pid) as engine:
        for name in "ab":
            assert client.activate(name).state == GPU_SLOT
        engine.delayed = {commands.LoadWeights, commands.StartGeneration}
        load = rq.LoadAdapter(client.new_id(), "c")
        generation = rq.Generate(client.new_id(), "a", "hello")
        client.send_request(load)
        client.send_request(generation)
        eventually(lambda: len(engine.running) == 2)
        engine.paused = True
        for request in (load, generation):
            assert client.final_reply(request.request_id).code == ErrorCode.ENGINE_GONE
        assert set(states(client).values()) == {"evicted"}
        # It reports its work when it continues; no request load for those reports.
        engine.finish()
        engine.paused = False
        wait_until_attached(client, "e")
        eventually(lambda: states(client).get("b") == GPU_SLOT, "the adapters that it still has")
        assert client.activate("c").state == GPU_SLOT
        done = client.call(rq.Generate(client.new_id(), "a", "hello"))
        assert done.finish_reason == "length"
    assert losses(directory)[0] == "e"


def without_times(adapters: Iterable[rq.AdapterView]) -> list[rq.AdapterView]:
    return [msgspec.structs.replace(view, counters=AdapterCounters()) for view in adapters]


def test_a_restart_keeps_the_adapters_of_the_engine(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "e", watched.pid) as engine:
        for name in "abc":
            assert client.activate(name).state == GPU_SLOT
        before, done = without_times(client.list().adapters), len(engine.received)
        process.kill()
        process.start()
        eventually(lambda: client.status().operations == 0 and engine.inventory_requests > 1)
        assert without_times(client.list().adapters) == before
        assert len(engine.received) == done
        assert losses(directory) == []


def test_reports_that_were_lost_are_received_by_the_next_controller(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "e", watched.pid) as engine:
        assert client.activate("a").state == GPU_SLOT
        engine.delayed = {commands.LoadWeights, commands.StartGeneration}
        load = rq.LoadAdapter(client.new_id(), "b")
        generation = rq.Generate(client.new_id(), "a", "hello")
        client.send_request(load)
        client.send_request(generation)
        eventually(lambda: len(engine.running) == 2)
        process.kill()
        engine.finish()
        eventually(lambda: not engine.running)
        process.start()
        assert client.call(load).state == "cpu-cached"
        assert client.call(generation).output_tokens == 2
        assert len(engine.commands_of(commands.StartGeneration)) == 1
        assert len(engine.commands_of(commands.LoadWeights)) == 2
        assert losses(directory) == []


def test_a_generation_whose_prompt_was_lost_can_be_requested_again(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "e", watched.pid) as engine:
        assert client.load("a").state == "cpu-cached"
        engine.delayed = {commands.StageWeights}
        generation = rq.Generate(client.new_id(), "a", "hello")
        client.send_request(generation)
        eventually(lambda: engine.running)
        process.kill()
        process.start()
        eventually(lambda: client.status().operations == 1)
        engine.finish()
        eventually(
            lambda: client.status().requests == 0, "the end of the generation without a prompt"
        )
        assert engine.commands_of(commands.StartGeneration) == []
        assert client.call(generation).finish_reason == "length"
        [started] = engine.commands_of(commands.StartGeneration)
        assert started.prompt == "hello"
    assert any(isinstance(message, records.PayloadLost) for message in logged(directory))


@after_silence
def test_an_engine_that_starts_while_no_controller_runs(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "first", watched.pid):
        assert client.activate("a").state == GPU_SLOT
        process.kill()
    with sleeper() as other, StandInEngine(directory, "second", other.pid):
        process.start()
        wait_until_attached(client, "second")
        assert client.activate("a").state == GPU_SLOT
    assert losses(directory)[0] == "first"


def test_the_disk_may_be_full_while_engines_end_and_start(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "first", watched.pid) as engine:
        assert client.activate("a").state == GPU_SLOT
        size_bytes = next((directory / "log").glob("*.log")).stat().st_size
        set_file_limit(process, size_bytes + 10)
        engine.paused = True
        watched.kill()
        eventually(lambda: "the log can't be written" in process.output())
    with sleeper() as other, StandInEngine(directory, "second", other.pid):
        for _ in range(3):
            assert client.load("b").code == ErrorCode.LOG_UNAVAILABLE
            time.sleep(0.5)
        assert client.status().engine_id == "first"
        set_file_limit(process, resource.RLIM_INFINITY)
        wait_until_attached(client, "second")
        assert client.activate("a").state == GPU_SLOT
        assert losses(directory) == ["first"]


def test_an_inconsistent_inventory_is_requested_again(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "e", watched.pid) as engine:
        assert client.activate("a").state == GPU_SLOT
        true = engine.adapters
        [(adapter_id, entry)] = true.items()
        engine.adapters = {adapter_id: msgspec.structs.replace(entry, slot=2, state="pinned")}
        process.kill()
        process.start()
        eventually(lambda: client.status().engine_id == "" and engine.inventory_requests > 2)
        engine.adapters = true
        wait_until_attached(client, "e")
        assert states(client) == {"a": GPU_SLOT}
        published = client.call(rq.FetchEvents(client.new_id(), 1)).events
        assert any(isinstance(one.event, events.ReportRefused) for one in published)


def test_a_status_and_an_adapter_show_the_engines_batching(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as watched, StandInEngine(directory, "e", watched.pid) as engine:
        engine.statistics = EngineStatistics(batching="single", batching_refusal="rows differ")
        client.load("a")
        eventually(lambda: client.status().engine == engine.statistics)
        shown = client.call(rq.ShowAdapter(client.new_id(), "a"))
        assert (shown.batching, shown.batching_refusal) == ("single", "rows differ")


def test_a_large_inventory_is_read(directory: Path, client: RawClient) -> None:
    path = "x" * 4000
    with Peer(directory, "engine.sock") as peer:
        peer.send(REPORTS.encode(reports.EngineBeat("large", 0)))
        while not isinstance(
            (request := COMMANDS.decode(peer.receive())).message, commands.RequestInventory
        ):
            continue
        entry = ("a", path, "print", 8, "cpu-cached", -1, 0, 1024, 512)
        held = tuple(reports.InventoryAdapter(i, *entry) for i in range(1, 2500))
        size = (3, 8 << 20, 0, (), held, request.seq)
        frame = REPORTS.encode(reports.EngineInventory("large", 0, "m", *size), request.epoch)
        assert len(frame) > 9 << 20
        peer.send(frame)
        wait_until_attached(client, "large")


def test_an_operation_without_a_report_costs_the_engine_and_returns_its_room(
    directory: Path,
) -> None:
    limits = msgspec.structs.replace(LIMITS, operation_timeout_ms=300)
    with (
        controller(directory, limits=limits, checked=True, engine_timeout_ms=LIVE_MS) as process,
        StandInEngine(directory, "e", os.getpid()) as engine,
        RawClient(directory) as client,
    ):
        engine.delayed = {commands.LoadWeights}
        load = rq.LoadAdapter(client.new_id(), "a")
        assert client.call(load).code == ErrorCode.ENGINE_GONE
        eventually(lambda: "engine has to be restarted" in process.output(), "the loss")
        assert all(tier.count == 0 for tier in client.status().tiers)
        # No supervisor restarts this engine; it is attached again and has ended the operation.
        engine.finish()
        eventually(lambda: getattr(client.load("b"), "state", "") == "cpu-cached", "a load")


def test_an_engine_of_an_earlier_supervisor_is_lost_when_the_server_starts(directory: Path) -> None:
    process = ControllerProcess(directory, engine_timeout_ms=LIVE_MS, preloads=(("used", "used"),))
    process.launch_id = "first"
    with sleeper() as old, RawClient(directory) as client:
        process.start()
        with StandInEngine(directory, "first-engine", old.pid):
            wait_until_attached(client, "first-engine")
            assert client.load("used").state == CPU_CACHED
            # The engine lives longer than its controller, and not longer than its supervisor.
            process.kill()
            process.start()
            wait_until_attached(client, "first-engine")
            assert losses(directory) == []
        process.kill()
        process.launch_id = "second"
        process.start()
        assert not client.status().engine_id
        assert losses(directory) == ["first-engine"]
        assert states(client) == {"used": EVICTED}
        with StandInEngine(directory, "second-engine", old.pid):
            eventually(lambda: states(client) == {"used": CPU_CACHED})
    assert process.stop() == 0, process.output()
