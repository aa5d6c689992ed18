"""Commands on a running server: readiness, requests in progress, settings, and its end."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from loradock.cli import life
from loradock.cli.exit_codes import ExitCode
from loradock.controller.core.limits import Limits
from loradock.controller.log.replay import replay
from loradock.messages import commands
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.parallel.processes import LIMITS, controller
from tests.support.simulation.command_runs import run, run_json
from tests.support.simulation.shell_examples import RawClient, StandInEngine, eventually
from tests.support.waiting import HANG_S


def started(engine: StandInEngine) -> Any:
    return eventually(lambda: engine.commands_of(commands.StartGeneration), "the generation")


def test_the_requests_in_progress_are_listed_and_can_be_cancelled(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with controller(directory), StandInEngine(directory, "e", os.getpid()) as engine:
        assert run("ready", "--timeout", str(HANG_S), directory=directory).stdout == (
            "ready: stand-in\n"
        )
        assert "no requests are in progress" in run("requests", directory=directory).stdout
        run("activate", "upper", directory=directory)
        engine.delayed = {commands.StartGeneration}
        with RawClient(directory) as client:
            client.send_request(rq.Generate("g", "upper", "p"))
            started(engine)
            (listed,) = run_json("requests", directory=directory)
            (view,) = listed["requests"]
            assert view["request_id"].endswith(":g")
            assert (view["kind"], view["adapter"], view["phase"]) == (
                *("generate", "upper"),
                "running",
            )
            shown = run("requests", directory=directory).stdout
            assert view["request_id"] in shown
            cancelled = run("cancel", view["request_id"], directory=directory)
            assert cancelled.exit_code == 0, cancelled.output
            assert engine.running
            engine.finish()
            assert client.final_reply("g").adapter == "upper"
        again = run("cancel", view["request_id"], directory=directory)
        assert again.exit_code == ExitCode.NOT_FOUND
        assert "`loradock requests` lists" in again.stderr
        (slow,) = run_json("slow", directory=directory)
        kinds = {one["kind"] for one in slow["operations"]}
        assert kinds == {"check", "load", "stage", "write"}
        assert {one["adapter"] for one in slow["operations"]} == {"upper"}
        assert "generate" in {one["kind"] for one in slow["waits"]}
        status = run("status", directory=directory)
        assert status.exit_code == 0
        assert re.search(r"^engine +e \(pid", status.stdout, re.M)


def test_a_server_without_an_engine_is_not_ready(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with controller(directory):
        eventually((directory / "run" / "requests.sock").exists)
        result = run("ready", "--timeout", "0", directory=directory)
        assert result.exit_code == ExitCode.UNREACHABLE
        assert "not ready after 0 s: no engine is attached" in result.stderr
        status = run("status", directory=directory)
        assert status.exit_code == ExitCode.UNREACHABLE
        assert re.search(r"^engine +none", status.stdout, re.M)
    absent = run("ready", "--timeout", "0", directory=tmp_path / "nothing")
    assert absent.exit_code == ExitCode.UNREACHABLE
    assert "no LoRADock server answers" in absent.stderr


def test_ready_ends_early_where_no_process_starts_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "START_S", 0.0)
    absent = run("ready", directory=tmp_path / "nothing")
    assert absent.exit_code == ExitCode.UNREACHABLE
    assert "not ready after 0 s: no LoRADock server answers at" in absent.stderr
    assert "start one: loradock --dir" in absent.stderr


def test_the_findings_of_a_refused_adapter_are_shown_and_not_logged(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    findings = ("first-finding", "second-finding")
    with controller(directory), StandInEngine(directory, "e", os.getpid()) as engine:
        run("ready", "--timeout", str(HANG_S), directory=directory)
        engine.refused["upper"] = "2 modules differ", findings
        short = run("load", "upper", directory=directory)
        assert short.exit_code == ExitCode.REFUSED
        assert "L003" in short.stderr
        assert "2 modules differ" in short.stderr
        assert "lists all 2 findings" in short.stderr
        assert "second-finding" not in short.stderr
        long = run("load", "upper", "--verbose", directory=directory)
        assert "\n  - first-finding\n  - second-finding\n" in long.stderr
        as_json = run("load", "upper", "--json", directory=directory)
        assert json.loads(as_json.stderr)["error"]["details"] == list(findings)
        unknown = run("show", "upper", directory=directory)
        assert unknown.exit_code == ExitCode.NOT_FOUND
        assert "the last attempt failed: L003 2 modules differ" in unknown.stderr
        assert "  - second-finding\n" in unknown.stderr
        engine.refused.clear()
        run("load", "upper", directory=directory)
        assert "failed" not in run("show", "upper", directory=directory).stdout
        engine.refused["upper"] = "2 modules differ", findings
        run("load", "upper", "--replace", directory=directory)
        shown = run("show", "upper", directory=directory)
        assert shown.exit_code == 0
        assert "ago: L003 2 modules differ\n  - first-finding\n" in shown.stdout
    logged = b"".join(path.read_bytes() for path in (directory / "log").glob("*.log"))
    assert b"2 modules differ" in logged
    assert b"finding" not in logged


def test_settings_change_while_the_server_runs_and_outlive_it(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with controller(directory) as process:
        with StandInEngine(directory, "e", os.getpid()) as engine:
            run("ready", "--timeout", str(HANG_S), directory=directory)
            run("activate", "upper", directory=directory)
            before = len(engine.received)
            words = ("max-cpu-loras=50", "host-bytes=1GiB", "retry-backoff=2.5", "policy=none")
            result = run("config", "set", *words, directory=directory)
            assert result.exit_code == 0, result.output
            (shown,) = run_json("config", "show", directory=directory)
            assert shown["policy"] == "none"
            expected = {"host_adapters_max": 50, "host_bytes_max": 1 << 30, "rest_ms": 2500}
            assert shown["limits"].items() >= expected.items()
            # Another change, in a segment without a record.
            assert run("config", "set", "retry-backoff=3", directory=directory).exit_code == 0
            run("load", "lower", directory=directory)
            assert [type(command) for command in engine.received[before:]] == [
                *(commands.CheckAdapter, commands.LoadWeights)
            ], "no adapter was moved for it"
            in_use = run("config", "set", "host-bytes=1", directory=directory)
            assert in_use.exit_code == ExitCode.REFUSED
            assert "evict or remove adapters first" in in_use.stderr
        process.kill()
        result = replay(directory / "log", from_start=True)
        assert result.divergence is None
        assert result.controller is not None
        assert result.controller.policy_name == "none"
        assert result.controller.limits.retry_backoff_ms == 3000
        process.start()
        eventually(lambda: run("config", "show", directory=directory).exit_code == 0)
        (shown,) = run_json("config", "show", directory=directory)
        assert (shown["policy"], shown["limits"]["rest_ms"]) == ("none", 3000)
    with controller(directory, limits=Limits(max_loras=LIMITS.max_loras, retry_backoff_ms=7)):
        eventually(lambda: run("config", "show", directory=directory).exit_code == 0)
        (shown,) = run_json("config", "show", directory=directory)
        assert (shown["policy"], shown["limits"]["rest_ms"]) == ("lru", 7)


@pytest.mark.parametrize(
    ("word", "code", "text"),
    [
        ("max-loras=4", ExitCode.REFUSED, "restart the server with --max-loras 4"),
        ("max-cpu-lora=4", ExitCode.USAGE, "did you mean max-cpu-loras?"),
        ("slots=4", ExitCode.USAGE, "did you mean max-loras?"),
        ("retry-backoff=soon", ExitCode.USAGE, "must be a number of seconds from 0.001 to 3600"),
        ("host-bytes=64M", ExitCode.USAGE, "has the unit 'M'; use KiB, MiB"),
        ("requests", ExitCode.USAGE, "write NAME=VALUE"),
    ],
)
def test_a_wrong_change_is_explained_before_it_is_sent(tmp_path, word, code, text) -> None:
    result = run("config", "set", word, directory=tmp_path)
    assert result.exit_code == code
    assert text in result.stderr


def test_a_stopping_server_ends_its_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    results: list[Any] = []
    with controller(directory) as process, RawClient(directory) as client:
        with StandInEngine(directory, "e", os.getpid()) as engine:
            run("ready", "--timeout", str(HANG_S), directory=directory)
            run("activate", "upper", directory=directory)
            engine.delayed = {commands.StartGeneration}
            client.send_request(rq.Generate("g", "upper", "p"))
            started(engine)
            words = ("stop", "--timeout", str(HANG_S))
            stop = threading.Thread(target=lambda: results.append(run(*words, directory=directory)))
            stop.start()
            eventually(lambda: client.status().stopping, "the stop")
            refused = client.call(rq.Generate("h", None, "p"))
            assert refused.code is ErrorCode.STOPPING
            assert client.load("other").code is ErrorCode.STOPPING
            assert process._process.poll() is None
            engine.finish()
            assert client.final_reply("g").finish_reason == "length"
            assert process._process.wait(HANG_S) == 0
        stop.join()
    assert results[0].exit_code == 0, results[0].output
    assert results[0].stdout == "stopped; 1 requests were in progress\n"


def test_a_stop_waits_for_no_request_beyond_its_time(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    peers = RawClient(directory), StandInEngine(directory, "e", os.getpid())
    with controller(directory) as process, peers[0] as client, peers[1] as engine:
        run("ready", "--timeout", str(HANG_S), directory=directory)
        run("activate", "upper", directory=directory)
        engine.delayed = {commands.StartGeneration}
        client.send_request(rq.Generate("g", "upper", "p"))
        started(engine)
        assert run("stop", "--timeout", "0", directory=directory).exit_code == 0
        assert process._process.wait(HANG_S) == 0


def test_adapters_are_loaded_at_the_start(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    preloads = (("one", "a/b"), ("two", "two"))
    with controller(directory, preloads=preloads), StandInEngine(directory, "e", os.getpid()):
        run("ready", "--timeout", str(HANG_S), directory=directory)
        (listed,) = run_json("list", directory=directory)
    found = {view["adapter"]: (view["path"], view["state"]) for view in listed["adapters"]}
    assert found == {"one": ("a/b", "cpu-cached"), "two": ("two", "cpu-cached")}


def test_refusals_are_in_the_servers_log(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with controller(directory), RawClient(directory) as client:
        request = rq.EvictAdapter(client.new_id(), "nothing")
        assert client.call(request).code is ErrorCode.UNKNOWN_ADAPTER
        log = directory.with_suffix(".controller.log")
        text = eventually(lambda: log.exists() and "request refused" in log.read_text() and log)
        # A client that is not answered in time repeats its request, which is refused again.
        line = next(one for one in text.read_text().splitlines() if "request refused" in one)
        assert "code=L006" in line
        assert f":{request.request_id}" in line
        assert "'nothing' is not known" in line
