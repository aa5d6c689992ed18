"""A request with an image and without an adapter runs with the default, as if it named it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.controller.core.controller import Controller
from loradock.controller.log.replay import replay
from loradock.controller.server.preloads import DefaultAdapters
from loradock.messages import commands, records, reports
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import NAME_PATTERN
from loradock.messages.prompts import MultimodalPrompt
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation.session_bench import ENGINE, LIMITS, SessionBench, id_of
from tests.support.simulation.shell_examples import RawClient, StandInEngine, eventually, logged

PATH = "tenants/vision"
PICTURE = MultimodalPrompt("<image>", (b"x",))
NAME = DefaultAdapters({"image": PATH}).by_modality["image"].name


def generate(request_id: str, prompt: Any = PICTURE, adapter: str | None = None) -> rq.Generate:
    return rq.Generate(request_id, adapter, prompt)


@pytest.mark.parametrize("prompt", ["text", (1, 2), PICTURE])
@pytest.mark.parametrize("adapter", [None, "own"])
@pytest.mark.parametrize("paths", [{}, {"image": PATH}])
def test_the_default_applies_to_images_without_an_adapter(
    prompt: Any, adapter: str | None, paths: Any
) -> None:
    default = DefaultAdapters(paths).adapter_of(generate("r", prompt, adapter))
    applies = prompt is PICTURE and adapter is None and bool(paths)
    assert (default is not None) == applies
    for kind in (rq.Embed, rq.Classify):
        assert DefaultAdapters(paths).adapter_of(kind("r", adapter, ("text",))) is None


def test_each_path_has_its_own_name() -> None:
    paths = ("a", "b", "a/b", "/a", "ä" * 2000, "..")
    names = [DefaultAdapters({"image": path}).by_modality["image"].name for path in paths]
    assert len(set(names)) == len(paths)
    assert all(re.match(NAME_PATTERN, name) for name in names)
    assert names[0] == "default-image-ca234c55", "logs have this name"


def test_each_request_to_load_it_has_an_id_of_its_own() -> None:
    default = DefaultAdapters({"image": PATH}).by_modality["image"]
    first, second = default.load(), default.load()
    assert first.request_id != second.request_id
    for load in (first, second):
        assert msgspec.convert(msgspec.to_builtins(load), rq.LoadAdapter) == load
        assert (load.adapter, load.path, load.replace) == (NAME, PATH, False)


class DefaultBench(SessionBench):
    """Client sessions with a default adapter, and an engine whose reports the test sends."""

    def __init__(self) -> None:
        super().__init__(PATH)
        self.ops = iter(range(1, 100))

    def report(self, report: type, *fields: Any) -> None:
        """Handle a report of the next operation."""
        self.handle(report(next(self.ops), *fields))

    def load_into_slot(self) -> None:
        self.report(reports.AdapterChecked, "print", 8, 1024, 512)
        for report in (reports.WeightsLoaded, reports.WeightsStaged, reports.SlotWritten):
            self.report(report)


@pytest.fixture
def bench() -> DefaultBench:
    return DefaultBench()


def test_the_first_request_loads_the_adapter_and_runs_with_it(bench: DefaultBench) -> None:
    assert bench.receive(generate("r-1")) == records.GenerationRequested(id_of("r-1"), NAME)
    assert bench.receive(generate("r-2")) == records.GenerationRequested(id_of("r-2"), NAME)
    view = bench.controller.world.current(NAME)
    assert (view.path, len(view.waiters)) == (PATH, 3)
    bench.load_into_slot()
    for request_id in ("r-1", "r-2"):
        bench.report(reports.GenerationEnded, "stop", 3, 1)
        expected = rq.GenerationDone(request_id, NAME, "stop", 3, 1)
        assert (b"c", expected) in bench.take_sent()


def test_no_other_request_runs_with_it(bench: DefaultBench) -> None:
    assert bench.receive(generate("r-1", "text")).adapter is None
    assert bench.receive(generate("r-2", (1, 2))).adapter is None
    assert bench.receive(generate("r-3", PICTURE, "own")) is None
    assert bench.controller.world.current(NAME) is None
    [(_, refused)] = bench.take_sent()
    assert (refused.request_id, refused.code) == ("r-3", ErrorCode.UNKNOWN_ADAPTER)


def test_a_default_that_does_not_load_refuses_with_the_error_of_its_load(
    bench: DefaultBench,
) -> None:
    for request_id in ("r-1", "r-2"):
        bench.receive(generate(request_id))
        bench.report(reports.OperationFailed, ErrorCode.PATH_NOT_ALLOWED, "below no root")
        # The request of the client is refused; the load has no client.
        expected = rq.Refused(request_id, ErrorCode.PATH_NOT_ALLOWED, "below no root")
        assert bench.take_sent() == [(b"c", expected)]
        assert bench.controller.world.current(NAME) is None
    # A repeated request gets its answer again, and loads nothing.
    bench.receive(generate("r-1"))
    assert bench.take_sent()[0][1].code == ErrorCode.PATH_NOT_ALLOWED
    assert bench.controller.world.current(NAME) is None


def test_after_its_removal_it_is_loaded_again(bench: DefaultBench) -> None:
    bench.receive(generate("r-1"))
    bench.report(reports.OperationFailed, ErrorCode.NOT_FINITE, "x")
    bench.receive(generate("r-2"))
    bench.load_into_slot()
    bench.report(reports.GenerationEnded, "stop", 3, 1)
    bench.receive(rq.RemoveAdapter("r-3", NAME))
    bench.take_sent()
    bench.receive(generate("r-4"))
    [(_, refused)] = bench.take_sent()
    assert refused.code == ErrorCode.UNKNOWN_ADAPTER, "it is being removed, so its name is gone"
    bench.report(reports.SlotReset)
    bench.report(reports.WeightsDropped)
    assert bench.controller.world.current(NAME) is None
    bench.receive(generate("r-5"))
    bench.load_into_slot()
    assert bench.controller.world.current(NAME).leases == 1


def test_the_log_is_sufficient_for_a_replay(bench: DefaultBench) -> None:
    """The core has no option and no default: the same inputs lead to the same state."""
    inputs: list[Any] = [(records.ControllerStarted(1), 1), (ENGINE, 1)]
    handle = bench.controller.handle
    bench.controller.handle = lambda *a: inputs.append(a) or handle(*a)  # type: ignore
    bench.receive(generate("r-1"))
    bench.load_into_slot()
    bench.receive(generate("r-2"))
    again = Controller(LIMITS, checked=True)
    for arguments in inputs:
        again.handle(*arguments)
    assert again.digest() == bench.controller.digest()
    kinds = [type(arguments[0]) for arguments in inputs]
    assert kinds.count(rq.LoadAdapter) == 1
    assert kinds.count(records.GenerationRequested) == 2


def restarted(directory: Path, process: ControllerProcess, path: str) -> None:
    """Restart the controller with the default at this path, or with none."""
    assert process.stop() == 0, process.output()
    paths = {"image": path} if path else {}
    process._config = msgspec.structs.replace(process._config, default_mm_loras=paths)
    process.start()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    found = tmp_path / "d"
    found.mkdir()
    yield found
    assert replay(found / "log", checked=True).divergence is None


def adapter_of_a_run(client: RawClient, **fields: Any) -> str | None:
    reply = client.call(rq.Generate(client.new_id(), None, PICTURE, **fields))
    assert isinstance(reply, rq.GenerationDone), reply
    return reply.adapter


def test_a_restart_keeps_it_and_another_path_is_another_adapter(directory: Path) -> None:
    with (
        controller(directory, checked=True, default_mm_loras={"image": PATH}) as process,
        StandInEngine(directory, "e", os.getpid()) as engine,
        RawClient(directory) as client,
    ):
        assert adapter_of_a_run(client) == NAME
        restarted(directory, process, PATH)
        assert adapter_of_a_run(client) == NAME
        [loaded] = engine.commands_of(commands.LoadWeights)
        assert (loaded.adapter, loaded.path) == (NAME, PATH)
        restarted(directory, process, "other")
        other = adapter_of_a_run(client)
        assert other == DefaultAdapters({"image": "other"}).by_modality["image"].name
        assert [load.path for load in engine.commands_of(commands.LoadWeights)] == [PATH, "other"]
        restarted(directory, process, "")
        assert adapter_of_a_run(client) is None
        assert {view.adapter for view in client.list().adapters} == {NAME, other}
        prompts = [start.prompt for start in engine.commands_of(commands.StartGeneration)]
        assert prompts == [PICTURE] * 4
    logged_requests = [r for r in logged(directory) if isinstance(r, records.GenerationRequested)]
    # A waiting client repeats its request, with the same id.
    named = {request.request_id: request.adapter for request in logged_requests}
    assert list(named.values()) == [NAME, NAME, other, None]


def test_a_request_that_waits_during_a_restart_keeps_its_adapter(directory: Path) -> None:
    """Its prompt is lost with the first process; sent again, it is the request that was logged."""
    with (
        controller(directory, checked=True, default_mm_loras={"image": PATH}) as process,
        RawClient(directory) as client,
    ):
        request = generate(client.new_id())
        client.send_request(request)
        eventually(lambda: client.status().requests == 2, "the request and its adapter's")
        restarted(directory, process, "other")
        client.send_request(request)
        # A query after the request: its reply shows that the prompt has been received.
        client.status()
        with StandInEngine(directory, "e", os.getpid()) as engine:
            assert client.final_reply(request.request_id).adapter == NAME
            assert [start.prompt for start in engine.commands_of(commands.StartGeneration)] == [
                PICTURE
            ]
