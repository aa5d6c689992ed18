"""Processes of `loradock serve` that hang are killed and restarted; slow ones are not."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loradock.cli import engine_commands
from loradock.cli.exit_codes import ExitCode
from loradock.cli.serve.children import is_stopped, process_tree
from loradock.client import Client
from loradock.messages.ids import GPU_SLOT
from loradock.messages.records import EngineLost
from loradock.messages.requests import LoadAdapter, StatusShown
from tests.support.engine.serve_process import serve, status_once, wait_for_end
from tests.support.simulation.command_runs import run, run_json
from tests.support.simulation.shell_examples import RawClient, logged
from tests.support.waiting import HANG_S, wait_until

ADAPTERS = ("reverse", "upper")
OPTIONS = ("--device", "cpu", "--max-lora-rank", "64", "--max-loras", "3", "--max-cpu-loras", "6")

SLOW_ENGINE = """
import pathlib, sys, time
from loradock.engine.worker import process
from loradock.engine.worker.engine import Engine

step, pause = Engine.step, pathlib.Path({pause!r})
def slow(self):
    if not self.is_idle and pause.exists():
        seconds = float(pause.read_text())
        pause.unlink()
        time.sleep(seconds)
    step(self)
Engine.step = slow
process.end(process.main())
"""
"""An engine whose next forward pass takes the seconds that a file contains, once."""

PRELUDE = """
from loradock.cli.serve import supervisor
command_of = supervisor.engine_command
def slow(process):
    words = command_of(process)
    at = words.index("engine")
    return [*words[:at - 2], "-c", {engine!r}, *words[at + 1:]]
supervisor.engine_command = slow
"""


def is_up(status: StatusShown) -> bool:
    return bool(status.engine_id)


class Load:
    """A client that generates until the end of the context; each request is retried."""

    def __init__(self, directory: Path, adapter: str) -> None:
        self.outputs: list[str] = []
        self._directory, self._adapter = directory, adapter
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Client(self._directory, timeout_s=HANG_S) as client:
            while not self._ending.is_set():
                answer = client.generate("hello>", self._adapter, attempts=100, max_tokens=8)
                self.outputs.append(answer.text())

    def wait_for_answers(self, count: int) -> None:
        goal = len(self.outputs) + count
        wait_until(lambda: len(self.outputs) >= goal, lambda: self.outputs, f"{count} answers")

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()


@contextmanager
def loaded(directory: Path) -> Iterator[tuple[Load, Load]]:
    """Two held adapters, and a client that uses each of them."""
    with Client(directory, timeout_s=HANG_S) as client:
        for name in ADAPTERS:
            client.hold(name)
    with Load(directory, ADAPTERS[0]) as first, Load(directory, ADAPTERS[1]) as second:
        for load in (first, second):
            load.wait_for_answers(2)
        yield first, second
    for load in (first, second):
        assert len(set(load.outputs)) == 1, "an answer differs from the others"


def wait_for_slots(directory: Path) -> None:
    with Client(directory, timeout_s=HANG_S) as client:
        wait_until(lambda: {view.state for view in client.list().adapters} == {GPU_SLOT})


@pytest.mark.parametrize("options", [(), ("--hang-timeout", "0.35")])
def test_stopped_processes_are_restarted_and_requests_are_answered(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    directory = tmp_path / "d"
    with serve(directory, *OPTIONS, *options) as process:
        first = status_once(directory, is_up)
        with loaded(directory) as loads:
            os.kill(first.engine_pid, signal.SIGSTOP)
            wait_for_end(first.engine_pid)
            second = status_once(directory, lambda s: s.engine_id not in ("", first.engine_id))
            for load in loads:
                load.wait_for_answers(2)
            wait_for_slots(directory)
            os.kill(second.controller_pid, signal.SIGSTOP)
            wait_for_end(second.controller_pid)
            third = status_once(directory, lambda s: s.epoch > second.epoch and is_up(s))
            for load in loads:
                load.wait_for_answers(2)
        # The engine has outlived its controller.
        assert (third.engine_id, third.engine_pid) == (second.engine_id, second.engine_pid)
        wait_for_slots(directory)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
    # One loss is the stopped engine's, one the end of the server.
    reasons = {one.reason for one in logged(directory) if isinstance(one, EngineLost)}
    assert reasons == {"its process ended"}


def test_a_long_step_is_no_loss_and_one_beyond_its_bound_is_a_hang(tmp_path: Path) -> None:
    directory, pause = tmp_path / "d", tmp_path / "pause"
    prelude = PRELUDE.format(engine=SLOW_ENGINE.format(pause=str(pause)))
    options = ("--engine-timeout", "5", "--step-timeout", "14")
    with serve(directory, *OPTIONS, *options, prelude=prelude) as process:
        first = status_once(directory, is_up)
        with Client(directory, timeout_s=HANG_S) as client:
            client.load("upper")
            expected = client.generate("hello>", "upper", max_tokens=8).text()
            pause.write_text("7")
            assert client.generate("hello>", "upper", max_tokens=8).text() == expected
            assert not pause.exists()
            assert client.status().engine_id == first.engine_id
            pause.write_text("86400")
            answer = client.generate("hello>", "upper", attempts=100, max_tokens=8)
            assert answer.text() == expected
            assert client.status().engine_id != first.engine_id
        assert len([one for one in logged(directory) if isinstance(one, EngineLost)]) == 1
        wait_for_end(first.engine_pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
    assert "step step exceeds 14 s" in directory.with_suffix(".log").read_text()


def test_the_engine_is_restarted_on_request_even_if_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engine that hangs gets this time to end by itself.
    monkeypatch.setattr(engine_commands, "_END_S", 2.0)
    directory, pause = tmp_path / "d", tmp_path / "pause"
    prelude = PRELUDE.format(engine=SLOW_ENGINE.format(pause=str(pause)))
    with serve(directory, *OPTIONS, prelude=prelude):
        first = status_once(directory, is_up)
        with loaded(directory) as loads:
            (second,) = run_json("engine", "restart", directory=directory)
            assert second["engine_id"] not in ("", first.engine_id)
            assert second["controller_pid"] == first.controller_pid
            wait_for_end(first.engine_pid)
            pause.write_text("86400")
            wait_until(lambda: not pause.exists())
            (third,) = run_json("engine", "restart", directory=directory)
            assert third["engine_id"] not in ("", first.engine_id, second["engine_id"])
            for load in loads:
                load.wait_for_answers(2)
        wait_for_slots(directory)


def test_without_an_engine_none_is_restarted(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory, "--engine", "external"):
        status_once(directory, lambda status: status.seq > 0)
        result = run("engine", "restart", directory=directory)
        assert result.exit_code == ExitCode.UNREACHABLE
        assert "no engine is attached" in result.stderr


def snapshotters_of(pid: int) -> list[int]:
    """Return the children that run a snapshotter's program.

    One that is stopped before it has begun its program keeps its parent from continuing.
    """
    commands = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in process_tree(pid)[1:]}
    return [one for one, command in commands.items() if b"snapshotter" in command.split(b"\0")]


def test_a_stopped_snapshotter_is_not_taken_for_its_controller(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    options = ("--engine", "external", "--snapshot-interval", "20", "--http", "127.0.0.1:0")
    with serve(directory, *options, "--hang-timeout", "0.35") as process:
        first = status_once(directory, lambda status: status.seq > 0)
        with RawClient(directory) as client:
            # They wait for an engine, and each of them is in the log.
            client.send_request(*(LoadAdapter(f"l-{n}", f"a-{n}") for n in range(20)))
            client.status()
        snapshotter = wait_until(lambda: snapshotters_of(first.controller_pid))[0]
        os.kill(snapshotter, signal.SIGSTOP)
        # A child that is stopped later is found to hang, so the controller was not.
        ours = {process.pid, first.controller_pid, snapshotter}
        (gateway,) = {*process_tree(process.pid)} - ours
        os.kill(gateway, signal.SIGSTOP)
        wait_for_end(gateway)
        assert is_stopped(snapshotter)
        last = status_once(directory, lambda status: status.seq > 20)
        assert last.controller_pid == first.controller_pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        wait_for_end(snapshotter)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_starved_processes_are_not_killed(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory, *OPTIONS, "--hang-timeout", "0.35"):
        first = status_once(directory, is_up)
        with loaded(directory) as loads, busy_loops(8):
            for load in loads:
                load.wait_for_answers(8)
        last = status_once(directory, is_up)
    assert (last.controller_pid, last.engine_pid) == (first.controller_pid, first.engine_pid)
    assert "hangs" not in directory.with_suffix(".log").read_text()
