"""Real controller processes whose handling of some inputs raises: they serve on, and start again.

The handlers raise after they have changed the state.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from loradock.controller.log.replay import replay
from loradock.controller.server.config import ServerConfig
from loradock.messages import records, reports
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.processes.subprocesses import EXIT_LOG
from tests.support.parallel.processes import LIMITS, ROOT, ControllerProcess
from tests.support.simulation.shell_examples import (
    RawClient,
    StandInEngine,
    eventually,
    logged,
    set_file_limit,
)

ENGINE_PID = os.getpid()

FAILING = """
import pathlib, resource, sys
from loradock.controller.core.controller import Controller
from loradock.controller.server import process

flags = pathlib.Path({flags!r})
if (full := flags / "disk-full-at").exists():
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(full.read_text()), resource.RLIM_INFINITY))
handle = Controller.handle

def failing_handle(self, message, *rest, **named):
    actions = handle(self, message, *rest, **named)
    once = flags / type(message).__name__
    if getattr(message, "adapter", "") == "poison" or once.exists():
        once.unlink(missing_ok=True)
        raise RuntimeError("half done")
    return actions

Controller.handle = failing_handle
sys.exit(process.main())
"""
"""A controller that fails to handle requests for `poison`, and once what a file is named after.

It starts on a disk that is full for files of the bytes in the file `disk-full-at`.
"""


class PoisonedController(ControllerProcess):
    """A controller process with failing handlers; `flags` is the directory of the files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.flags = directory.with_suffix(".flags")
        self.flags.mkdir()
        config = ServerConfig(str(directory), LIMITS, checked=True)
        code = FAILING.format(flags=str(self.flags))
        self._command = [sys.executable, "-c", code, msgspec.json.encode(config).decode()]

    def start(self) -> None:
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=errors, stderr=errors)


@contextmanager
def poisoned(directory: Path, *flags: str) -> Iterator[PoisonedController]:
    process = PoisonedController(directory)
    for flag in flags:
        (process.flags / flag).touch()
    process.start()
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def process(directory: Path) -> Iterator[PoisonedController]:
    with poisoned(directory) as found:
        yield found


@pytest.fixture
def client(directory: Path, process: PoisonedController) -> Iterator[RawClient]:
    with RawClient(directory) as found:
        found.status()
        yield found


def names(client: RawClient) -> list[str]:
    return [view.adapter for view in client.list().adapters]


def assert_replays(directory: Path, client: RawClient) -> None:
    """Assert that handlers that do not fail skip the same inputs."""
    status = client.status()
    assert replay(directory / "log", status.seq, checked=True).digest == status.digest


def test_only_the_poisonous_request_is_refused_and_later_starts_skip_it(
    directory: Path, process: PoisonedController, client: RawClient
) -> None:
    with StandInEngine(directory, "e", ENGINE_PID):
        assert client.load("a").state == "cpu-cached"
        os.kill(process.pid, signal.SIGSTOP)
        group = [rq.LoadAdapter(client.new_id(), name) for name in ("b", "poison", "c")]
        for request in group:
            client.send_request(request)
        os.kill(process.pid, signal.SIGCONT)
        replies = {}
        while len(replies) < 3:
            reply = client.reply()
            replies[reply.request_id] = reply
        done, refused, also_done = (replies[request.request_id] for request in group)
        assert (done.state, also_done.state) == ("cpu-cached", "cpu-cached")
        assert refused.code is ErrorCode.HANDLING_FAILED
        assert "changed nothing" in refused.message
        assert names(client) == ["a", "b", "c"]
        assert_replays(directory, client)
        process.kill()
        process.start()
        assert client.load("d").state == "cpu-cached"
        assert client.load("poison").code is ErrorCode.HANDLING_FAILED
        assert names(client) == ["a", "b", "c", "d"]
        assert_replays(directory, client)
    assert sum(isinstance(message, records.InputSkipped) for message in logged(directory)) == 2


@pytest.mark.parametrize("kind", [reports.WeightsStaged, reports.EngineInventory])
def test_a_report_that_can_not_be_handled_is_made_up_for_by_an_inventory(
    directory: Path, process: PoisonedController, client: RawClient, kind: type
) -> None:
    (process.flags / kind.__name__).touch()
    with StandInEngine(directory, "e", ENGINE_PID):
        eventually(lambda: client.status().engine_id == "e", "the engine")
        assert client.activate("a").state == "gpu-slot"
        assert_replays(directory, client)
    assert not (process.flags / kind.__name__).exists()
    assert any(isinstance(message, records.InputSkipped) for message in logged(directory))


def test_a_start_that_can_not_be_handled_ends_the_process(directory: Path) -> None:
    with poisoned(directory, "ControllerStarted") as process:
        assert process.wait() == 1
        assert "half done" in process.output()
        process.start()
        with RawClient(directory) as client:
            assert client.status().epoch


def test_an_input_that_was_handled_before_is_not_skipped_at_a_start(
    directory: Path, process: PoisonedController, client: RawClient
) -> None:
    # Without an engine it is ended by a later input, so the log shows that it was handled.
    client.load("a", timeout_ms=1)
    process.kill()
    (process.flags / "LoadAdapter").touch()
    process.start()
    assert process.wait() == EXIT_LOG
    assert "handling record 2 (LoadAdapter) fails: RuntimeError: half done" in process.output()
    assert "loradock log skip 2" in process.output()
    process.start()
    assert client.status().epoch


def test_that_an_input_is_skipped_is_logged_first_also_after_a_start_on_a_full_disk(
    directory: Path, process: PoisonedController, client: RawClient
) -> None:
    """A crash after any other record would make it an input that was handled."""
    client.send_request(rq.LoadAdapter(client.new_id(), "a"))
    eventually(lambda: isinstance(logged(directory)[-1], rq.LoadAdapter), "the request")
    process.kill()
    (process.flags / "LoadAdapter").touch()
    [segment] = (directory / "log").glob("*.log")
    (process.flags / "disk-full-at").write_text(str(segment.stat().st_size + 10))
    process.start()
    assert client.load("b").code is ErrorCode.LOG_UNAVAILABLE
    set_file_limit(process, resource.RLIM_INFINITY)
    eventually(lambda: isinstance(logged(directory)[-1], records.ControllerStarted), "the start")
    before, skipped, _ = logged(directory)[-3:]
    assert isinstance(before, rq.LoadAdapter)
    assert isinstance(skipped, records.InputSkipped)
