"""A request that brings an image and names no adapter runs under the default, as if it named it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.core.controller import Controller
from controller.log.replay import replay
from controller.shell.default_adapters import DefaultAdapters, default_paths
from messages import commands, records, reports
from messages import requests as rq
from messages.errors import ErrorCode
from messages.ids import NAME_PATTERN
from tests.controller.shell.test_client_sessions import ENGINE, LIMITS, Counter
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation.shell_examples import RawClient, StandInEngine, eventually, logged

PATH = "tenants/vision"
PICTURE = rq.IllustratedPrompt("<image>", (b"x",))
NAME = DefaultAdapters({"image": PATH}).by_modality["image"].name


def generate(request_id: str, prompt: Any = PICTURE, adapter: str | None = None) -> rq.Generate:
    return rq.Generate(request_id, adapter, prompt)


@pytest.mark.parametrize("prompt", ["text", (1, 2), PICTURE])
@pytest.mark.parametrize("adapter", [None, "own"])
@pytest.mark.parametrize("paths", [{}, {"image": PATH}])
def test_the_rule(prompt: Any, adapter: str | None, paths: Any) -> None:
    default = DefaultAdapters(paths).of(generate("r", prompt, adapter))
    applies = prompt is PICTURE and adapter is None and bool(paths)
    assert (default is not None) == applies
    for kind in (rq.Embed, rq.Classify):
        assert DefaultAdapters(paths).of(kind("r", adapter, ("text",))) is None


def test_a_path_has_one_name_and_another_path_another() -> None:
    paths = ("a", "b", "a/b", "/a", "ä" * 2000, "..")
    names = [DefaultAdapters({"image": path}).by_modality["image"].name for path in paths]
    assert len(set(names)) == len(paths)
    assert all(re.match(NAME_PATTERN, name) for name in names)
    assert names[0] == "default-image-ca234c55", "a log knows it by this name"


def test_each_request_to_load_it_has_an_id_of_its_own() -> None:
    default = DefaultAdapters({"image": PATH}).by_modality["image"]
    first, second = default.load(), default.load()
    assert first.request_id != second.request_id
    for load in (first, second):
        assert msgspec.convert(msgspec.to_builtins(load), rq.LoadAdapter) == load
        assert (load.adapter, load.path, load.replace) == (NAME, PATH, False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["image"], "MODALITY=PATH"),
        (["image="], "MODALITY=PATH"),
        (["=a"], "MODALITY=PATH"),
        (["audio=a"], "images are all"),
        (["image=a", "image=b"], "have 'a' already"),
    ],
)
def test_options_that_say_nothing_of_use_are_told(options: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        default_paths(options)


def test_options_say_paths() -> None:
    assert default_paths([]) == {}
    assert default_paths(["image=a=b"]) == {"image": "a=b"}


class Recorder(Counter):
    """A desk with a default, and an engine that the test speaks for."""

    def __init__(self) -> None:
        super().__init__(PATH)
        self.ops = iter(range(1, 100))

    def tell(self, report: type, *fields: Any) -> None:
        """The report of the next operation; its answers go out."""
        for action in self.controller.handle(report(next(self.ops), *fields), 1):
            if isinstance(getattr(action, "message", None), rq.Reply):
                self.desk.answer(action.message)

    def bring_into_slot(self) -> None:
        self.tell(reports.AdapterChecked, "print", 8, 1024, 512)
        for report in (reports.WeightsLoaded, reports.WeightsStaged, reports.SlotWritten):
            self.tell(report)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_the_first_request_brings_the_adapter_and_runs_under_it(recorder: Recorder) -> None:
    assert recorder.receive(generate("r-1")) == records.GenerationRequested("r-1", NAME)
    assert recorder.receive(generate("r-2")) == records.GenerationRequested("r-2", NAME)
    view = recorder.controller.world.current(NAME)
    assert (view.path, len(view.waiters)) == (PATH, 3)
    recorder.bring_into_slot()
    for request_id in ("r-1", "r-2"):
        recorder.tell(reports.GenerationEnded, "stop", 3, 1)
        expected = rq.GenerationDone(request_id, NAME, "stop", 3, 1)
        assert (b"c", expected) in recorder.take_sent()


def test_nobody_else_runs_under_it(recorder: Recorder) -> None:
    assert recorder.receive(generate("r-1", "text")).adapter is None
    assert recorder.receive(generate("r-2", (1, 2))).adapter is None
    assert recorder.receive(generate("r-3", PICTURE, "own")).adapter == "own"
    assert recorder.controller.world.current(NAME) is None
    [(_, refused)] = recorder.take_sent()
    assert (refused.request_id, refused.code) == ("r-3", ErrorCode.UNKNOWN_ADAPTER)


def test_one_that_does_not_load_refuses_with_its_own_error(recorder: Recorder) -> None:
    for request_id in ("r-1", "r-2"):
        recorder.receive(generate(request_id))
        recorder.tell(reports.OperationFailed, ErrorCode.PATH_NOT_ALLOWED, "below no root")
        # Who asked is told; the request to load it was nobody's.
        expected = rq.Refused(request_id, ErrorCode.PATH_NOT_ALLOWED, "below no root")
        assert recorder.take_sent() == [(b"c", expected)]
        assert recorder.controller.world.current(NAME) is None
    # What was answered is not taken up anew, and loads nothing.
    recorder.receive(generate("r-1"))
    assert recorder.take_sent()[0][1].code == ErrorCode.PATH_NOT_ALLOWED
    assert recorder.controller.world.current(NAME) is None


def test_after_its_removal_it_is_brought_again(recorder: Recorder) -> None:
    recorder.receive(generate("r-1"))
    recorder.tell(reports.OperationFailed, ErrorCode.NOT_FINITE, "x")
    recorder.receive(generate("r-2"))
    recorder.bring_into_slot()
    recorder.tell(reports.GenerationEnded, "stop", 3, 1)
    recorder.receive(rq.RemoveAdapter("r-3", NAME))
    recorder.take_sent()
    recorder.receive(generate("r-4"))
    [(_, refused)] = recorder.take_sent()
    assert refused.code == ErrorCode.CONFLICT, "it is on its way out"
    recorder.tell(reports.SlotReset)
    recorder.tell(reports.WeightsDropped)
    assert recorder.controller.world.current(NAME) is None
    recorder.receive(generate("r-5"))
    recorder.bring_into_slot()
    assert recorder.controller.world.current(NAME).leases == 1


def test_what_is_logged_says_all_of_it(recorder: Recorder) -> None:
    """The core has no option and no default: the same inputs alone make the same world."""
    inputs: list[Any] = [records.ControllerStarted(1), ENGINE]
    handle = recorder.controller.handle
    recorder.controller.handle = lambda *a: inputs.append(a[0]) or handle(*a)  # type: ignore
    recorder.receive(generate("r-1"))
    recorder.bring_into_slot()
    recorder.receive(generate("r-2"))
    again = Controller(LIMITS, checked=True)
    for message in inputs:
        again.handle(message, 1)
    assert again.digest() == recorder.controller.digest()
    kinds = [type(message) for message in inputs]
    assert kinds.count(rq.LoadAdapter) == 1
    assert kinds.count(records.GenerationRequested) == 2


def restarted(directory: Path, process: ControllerProcess, path: str) -> None:
    """The controller's next life, with the default at this path, or with none."""
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


def ran_under(client: RawClient, **fields: Any) -> str | None:
    reply = client.ask(rq.Generate(client.new_id(), None, PICTURE, **fields))
    assert isinstance(reply, rq.GenerationDone), reply
    return reply.adapter


def test_a_restart_keeps_it_and_another_path_is_another_adapter(directory: Path) -> None:
    with (
        controller(directory, checked=True, default_mm_loras={"image": PATH}) as process,
        StandInEngine(directory, "e", os.getpid()) as engine,
        RawClient(directory) as client,
    ):
        assert ran_under(client) == NAME
        restarted(directory, process, PATH)
        assert ran_under(client) == NAME
        [loaded] = engine.got(commands.LoadWeights)
        assert (loaded.adapter, loaded.path) == (NAME, PATH)
        restarted(directory, process, "other")
        other = ran_under(client)
        assert other == DefaultAdapters({"image": "other"}).by_modality["image"].name
        assert [load.path for load in engine.got(commands.LoadWeights)] == [PATH, "other"]
        restarted(directory, process, "")
        assert ran_under(client) is None
        assert {view.adapter for view in client.list().adapters} == {NAME, other}
        prompts = [start.prompt for start in engine.got(commands.StartGeneration)]
        assert prompts == [PICTURE] * 4
    asked = [r for r in logged(directory) if isinstance(r, records.GenerationRequested)]
    # A client that waits asks again, under the same id.
    named = {request.request_id: request.adapter for request in asked}
    assert list(named.values()) == [NAME, NAME, other, None]


def test_a_request_that_waits_over_a_restart_stays_what_it_was(directory: Path) -> None:
    """Its prompt dies with the first life; sent again, it is the request that was logged."""
    with (
        controller(directory, checked=True, default_mm_loras={"image": PATH}) as process,
        RawClient(directory) as client,
    ):
        request = generate(client.new_id())
        client.put(request)
        eventually(lambda: client.status().requests == 2, "the request and its adapter's")
        restarted(directory, process, "other")
        client.put(request)
        # Asked behind it, so that the prompt is there before an engine could want it.
        client.status()
        with StandInEngine(directory, "e", os.getpid()) as engine:
            assert client.answer(request.request_id).adapter == NAME
            assert [start.prompt for start in engine.got(commands.StartGeneration)] == [PICTURE]
