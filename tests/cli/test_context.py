"""Tests of what commands share: waiting for a server, its absence, completion."""

import json
import os

import pytest

from loradock.cli.exit_codes import ExitCode
from loradock.controller.log.segments import lock_directory
from loradock.messages import requests as rq
from tests.support.simulation.command_runs import run, start_command
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import HANG_S

COMMANDS = [
    ["status"],
    ["generate", "p"],
    ["embed", "text"],
    ["events", "--since", "0"],
    ["requests"],
    ["slow"],
    ["stop"],
    ["cancel", "c:1"],
    ["config", "show"],
    ["top", "--once"],
    ["bench"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_without_a_server_a_command_ends_at_once_and_names_the_directory(tmp_path, arguments):
    result = run(*arguments, directory=tmp_path)
    assert result.exit_code == ExitCode.UNREACHABLE
    line, hint = result.stderr.splitlines()
    assert line == f"L011 no LoRADock server answers at {tmp_path} (no socket there)"
    serve = f"loradock --dir {tmp_path} serve --model MODEL --adapter-root ADAPTERS"
    assert hint == f"  start one: {serve}"


def test_a_socket_without_a_process_is_no_server(tmp_path):
    with StandIn(tmp_path):
        pass
    stopped = run("status", "--json", directory=tmp_path)
    error = json.loads(stopped.stderr)["error"]
    assert (error["code"], error["exit"]) == ("L011", ExitCode.UNREACHABLE)
    assert error["message"].endswith("(nothing listens on its socket)")


def test_no_command_waits_for_a_server(monkeypatch, tmp_path):
    def refuse_to_sleep(_seconds):
        raise AssertionError("a command sleeps without a server")

    monkeypatch.setattr("time.sleep", refuse_to_sleep)
    assert run("status", directory=tmp_path).exit_code == ExitCode.UNREACHABLE


def test_a_server_that_starts_is_named_by_its_process(tmp_path):
    (tmp_path / "log").mkdir()
    fd = lock_directory(tmp_path / "log")
    try:
        result = run("status", directory=tmp_path)
    finally:
        os.close(fd)
    assert f"process {os.getpid()} is starting or stopping one" in result.stderr
    assert "ready waits for it" in result.stderr
    assert "serve --model" in run("status", directory=tmp_path).stderr


def test_a_silent_server_ends_in_unreachable(controller):
    controller.answers[rq.ShowStatus] = lambda request: None
    result = run("status", "--timeout", "0.05", directory=controller.directory)
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "L011" in result.stderr
    assert "no answer within 0.05 s" in result.stderr
    assert "loradock serve" in result.stderr
    assert "Traceback" not in result.output


def test_an_invalid_name_is_explained(controller):
    result = run("load", "with space", directory=controller.directory)
    line, hint = result.stderr.splitlines()
    assert "'with space' is not a valid adapter name: use 1 to 128 of the characters" in line
    assert line.endswith("loradock load NAME --path DIRECTORY")
    assert "`loradock COMMAND --help`" in hint


def test_a_directory_with_a_too_long_socket_path_is_refused(tmp_path):
    result = run("status", directory=tmp_path / ("d" * 100))
    assert result.exit_code == ExitCode.USAGE
    assert "Unix allows 107" in result.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("loradock show u", ["upper"]),
        ("loradock activate upper ", ["reverse", "upper"]),
        ("loradock generate p --adapter re", ["reverse"]),
        ("loradock show x", []),
    ],
)
def test_names_are_completed(controller, words, completed):
    environment = {
        "_LORADOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    process = start_command(directory=controller.directory, env=environment)
    output, errors = process.communicate(timeout=HANG_S)
    assert output.split() == completed
    assert errors == ""


def test_completion_is_silent_without_a_controller(tmp_path):
    environment = {
        "_LORADOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "loradock show u",
        "COMP_CWORD": "2",
    }
    process = start_command(directory=tmp_path, env=environment)
    output, errors = process.communicate(timeout=HANG_S)
    assert (output.split(), errors) == ([], "")
