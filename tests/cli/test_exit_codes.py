"""Tests of exit codes: each error ends in a line, a hint and its code."""

import json
import re

import pytest

from loradock.cli.exit_codes import EXIT_CODES, EXIT_MEANINGS, HINTS, ExitCode
from loradock.messages import requests as rq
from loradock.messages.errors import MEANINGS, ErrorCode
from tests.support.simulation.command_runs import run


def test_every_error_has_an_exit_code_and_a_hint_and_the_help_lists_them():
    assert set(EXIT_CODES) == set(HINTS) == set(ErrorCode)
    assert set(EXIT_MEANINGS) == set(ExitCode)
    output = run("--help").output
    for code, exit_code in EXIT_CODES.items():
        assert code.value in EXIT_MEANINGS[exit_code]
    for exit_code in ExitCode:
        assert re.search(
            rf"\b{exit_code.value} +{re.escape(EXIT_MEANINGS[exit_code][:30])}", output
        )


@pytest.mark.parametrize("code", ErrorCode)
def test_a_refusal_ends_in_a_line_a_hint_and_its_exit_code(controller, code):
    def refuse(request):
        return rq.Refused(request.request_id, code, "found [this], allowed that")

    controller.answers[rq.LoadAdapter] = refuse
    result = run("load", "upper", directory=controller.directory)
    assert result.exit_code == EXIT_CODES[code]
    assert result.stdout == ""
    line, hint = result.stderr.splitlines()
    assert line == f"{code} {MEANINGS[code].summary}: found [this], allowed that"
    assert hint.strip() == HINTS[code]
    as_json = run("load", "upper", "--json", directory=controller.directory)
    assert (as_json.exit_code, as_json.stdout) == (result.exit_code, "")
    error = json.loads(as_json.stderr)["error"]
    assert error["code"] == code
    assert error["exit"] == result.exit_code
    assert error["retryable"] == MEANINGS[code].retryable
    assert error["request_id"] == controller.received[-1].request_id


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", "no such name!"],
        ["load"],
        ["load", "upper", "--timeout", "0"],
        ["activate", "a", "b", "--path", "x"],
        ["generate", "p", "--temperature", "-1"],
        ["generate", "p", "--stop", ""],
        ["events", "--since", "-1"],
        ["serve"],
        ["serve", "--model", "m", "--host-bytes", "64M"],
        ["serve", "--model", "m", "--max-loras", "0"],
        ["serve", "--model", "m", "--max-loras", "9", "--max-cpu-loras", "8"],
        ["serve", "--model", "m", "--policy", "fair"],
        ["serve", "--model", "m", "--default-mm-lora", "audio=a"],
        ["serve", "--model", "m", "--sync", "maybe"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_ends_in_its_code_before_anything_is_sent(controller, arguments):
    result = run(*arguments, directory=controller.directory)
    assert result.exit_code == ExitCode.USAGE
    assert "Traceback" not in result.output
    assert controller.received == []
