"""A real controller's process, and engines that come, go, fall silent and say what can't be.

The engines are stand-ins, so that they can do all that at will; the process that the controller is
told to watch is one of ours that sleeps.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.log.replay import replay
from messages import commands, events, records, reports
from messages import requests as rq
from messages.errors import ErrorCode
from messages.ids import GPU_SLOT
from messages.wire import COMMANDS, REPORTS
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation.shell_examples import (
    Peer,
    RawClient,
    StandInEngine,
    eventually,
    logged,
    set_file_limit,
)

ASK = commands.RequestInventory

TIMEOUT_MS = 3_000
"""The time after which a silent engine counts as gone; a stand-in beats thirty times as often."""


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "d"
    found.mkdir()
    return found


@pytest.fixture
def process(directory: Path) -> Iterator[ControllerProcess]:
    options: dict[str, Any] = {"checked": True, "engine_timeout_ms": TIMEOUT_MS}
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


def attached(client: RawClient, engine_id: str) -> None:
    eventually(lambda: client.status().engine_id == engine_id, engine_id)


def test_a_dead_engine_is_told_and_the_next_one_gets_its_goals(
    directory: Path, client: RawClient
) -> None:
    with sleeper() as first, StandInEngine(directory, "first", first.pid) as engine:
        assert client.ask(rq.HoldAdapter(client.new_id(), "held")).state == GPU_SLOT
        assert client.activate("used").state == GPU_SLOT
        engine.keep = {commands.CheckAdapter, commands.StartGeneration}
        waits = rq.LoadAdapter(client.new_id(), "waits")
        talks = rq.Generate(client.new_id(), "used", "hello")
        client.put(waits)
        client.put(talks)
        eventually(lambda: len(engine.running) == 2)
        # It is deaf before it dies, as a process is; its beats do not end it here.
        engine.paused = True
        first.kill()
        for request in (waits, talks):
            assert client.answer(request.request_id).code == ErrorCode.ENGINE_GONE
        assert client.status().engine_id == ""
        assert states(client) == {"held": "evicted", "used": "evicted"}
    with sleeper() as second, StandInEngine(directory, "second", second.pid):
        attached(client, "second")
        eventually(lambda: states(client)["held"] == GPU_SLOT, "the held adapter")
        assert client.activate("used").state == GPU_SLOT
    assert losses(directory)[0] == "first"


def test_what_a_dead_engine_still_had_under_way_changes_nothing(
    directory: Path, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "first", body.pid) as engine:
        assert client.load("a").state == "cpu-cached"
        body.kill()
        eventually(lambda: client.status().engine_id == "", "the loss")
        # It goes on beating for a moment, as frames that were on their way do.
        with sleeper() as other, StandInEngine(directory, "second", other.pid):
            attached(client, "second")
            assert client.load("a").state == "cpu-cached"
            assert engine.engine_id not in losses(directory)[1:]


def test_a_silent_engine_is_lost_and_taken_back(directory: Path, client: RawClient) -> None:
    with sleeper() as body, StandInEngine(directory, "e", body.pid) as engine:
        for name in "ab":
            assert client.activate(name).state == GPU_SLOT
        engine.keep = {commands.LoadWeights, commands.StartGeneration}
        waits = rq.LoadAdapter(client.new_id(), "c")
        talks = rq.Generate(client.new_id(), "a", "hello")
        client.put(waits)
        client.put(talks)
        eventually(lambda: len(engine.running) == 2)
        engine.paused = True
        for request in (waits, talks):
            assert client.answer(request.request_id).code == ErrorCode.ENGINE_GONE
        assert set(states(client).values()) == {"evicted"}
        # What it does meanwhile it tells when it can; nobody waits for that any more.
        engine.finish()
        engine.paused = False
        attached(client, "e")
        eventually(lambda: states(client).get("b") == GPU_SLOT, "what it still holds")
        assert client.activate("c").state == GPU_SLOT
        done = client.ask(rq.Generate(client.new_id(), "a", "hello"))
        assert done.finish_reason == "length"
    assert losses(directory)[0] == "e"


def test_a_restart_keeps_what_the_engine_holds(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "e", body.pid) as engine:
        for name in "abc":
            assert client.activate(name).state == GPU_SLOT
        before, done = client.list().adapters, len(engine.received)
        process.kill()
        process.start()
        eventually(lambda: client.status().operations == 0 and engine.asked > 1)
        assert client.list().adapters == before
        assert len(engine.received) == done
        assert losses(directory) == []


def test_reports_that_nobody_could_hear_are_heard_in_the_next_life(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "e", body.pid) as engine:
        assert client.activate("a").state == GPU_SLOT
        engine.keep = {commands.LoadWeights, commands.StartGeneration}
        waits = rq.LoadAdapter(client.new_id(), "b")
        talks = rq.Generate(client.new_id(), "a", "hello")
        client.put(waits)
        client.put(talks)
        eventually(lambda: len(engine.running) == 2)
        process.kill()
        engine.finish()
        eventually(lambda: not engine.running)
        process.start()
        assert client.ask(waits).state == "cpu-cached"
        assert client.ask(talks).output_tokens == 2
        assert len(engine.got(commands.StartGeneration)) == 1
        assert len(engine.got(commands.LoadWeights)) == 2
        assert losses(directory) == []


def test_a_generation_whose_prompt_died_is_asked_for_again(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "e", body.pid) as engine:
        assert client.load("a").state == "cpu-cached"
        engine.keep = {commands.StageWeights}
        talks = rq.Generate(client.new_id(), "a", "hello")
        client.put(talks)
        eventually(lambda: engine.running)
        process.kill()
        process.start()
        eventually(lambda: client.status().operations == 1)
        engine.finish()
        eventually(lambda: client.status().requests == 0, "the end of what lost its prompt")
        assert engine.got(commands.StartGeneration) == []
        assert client.ask(talks).finish_reason == "length"
        [started] = engine.got(commands.StartGeneration)
        assert started.prompt == "hello"
    assert any(isinstance(message, records.PayloadLost) for message in logged(directory))


def test_an_engine_that_came_while_nobody_was_there(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "first", body.pid):
        assert client.activate("a").state == GPU_SLOT
        process.kill()
    with sleeper() as other, StandInEngine(directory, "second", other.pid):
        process.start()
        attached(client, "second")
        assert client.activate("a").state == GPU_SLOT
    assert losses(directory)[0] == "first"


def test_the_disk_may_be_full_while_engines_go_and_come(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "first", body.pid) as engine:
        assert client.activate("a").state == GPU_SLOT
        size_bytes = next((directory / "log").glob("*.log")).stat().st_size
        set_file_limit(process, size_bytes + 10)
        engine.paused = True
        body.kill()
        eventually(lambda: "the log can't be written" in process.output())
    with sleeper() as other, StandInEngine(directory, "second", other.pid):
        for _ in range(3):
            assert client.load("b").code == ErrorCode.LOG_UNAVAILABLE
            time.sleep(0.5)
        assert client.status().engine_id == "first"
        set_file_limit(process, resource.RLIM_INFINITY)
        attached(client, "second")
        assert client.activate("a").state == GPU_SLOT
        assert losses(directory) == ["first"]


def test_an_inventory_that_can_not_be_true_is_asked_for_again(
    directory: Path, process: ControllerProcess, client: RawClient
) -> None:
    with sleeper() as body, StandInEngine(directory, "e", body.pid) as engine:
        assert client.activate("a").state == GPU_SLOT
        true = engine.held
        [(adapter_id, entry)] = true.items()
        engine.held = {adapter_id: msgspec.structs.replace(entry, slot=2, state="pinned")}
        process.kill()
        process.start()
        eventually(lambda: client.status().engine_id == "" and engine.asked > 2)
        engine.held = true
        attached(client, "e")
        assert states(client) == {"a": GPU_SLOT}
        refused = client.ask(rq.FetchEvents(client.new_id(), 1)).events
        assert any(isinstance(told.event, events.ReportRefused) for told in refused)


def test_a_large_inventory_is_read(directory: Path, client: RawClient) -> None:
    path = "x" * 4000
    with Peer(directory, "engine.sock") as peer:
        peer.send(REPORTS.encode(reports.EngineBeat("large", 0)))
        while not isinstance((asked := COMMANDS.decode(peer.receive())).message, ASK):
            continue
        entry = ("a", path, "print", 8, "cpu-cached", -1, 0, 1024, 512)
        held = tuple(reports.InventoryAdapter(i, *entry) for i in range(1, 2500))
        size = (3, 8 << 20, 0, (), held, asked.seq)
        frame = REPORTS.encode(reports.EngineInventory("large", 0, "m", *size), asked.epoch)
        assert len(frame) > 9 << 20
        peer.send(frame)
        attached(client, "large")
