"""The load test of `bench`: which requests it sends, and what it reports."""

import itertools
import json
import signal

import pytest

from loradock.cli.bench import quantiles
from loradock.cli.exit_codes import ExitCode
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.simulation.command_runs import run, run_json, start_command
from tests.support.waiting import HANG_S, wait_until


def refuse_all(controller):
    controller.answers[rq.Generate] = lambda request: rq.Refused(
        request.request_id, ErrorCode.OVERLOADED, "too many"
    )


def test_requests_take_turns_among_the_adapters(controller):
    options = ["--requests", "6", "--concurrency", "2", "--max-tokens", "2", "--prompt", "p"]
    adapters = ["--adapter", "upper", "--adapter", "reverse"]
    [result] = run_json("bench", *options, *adapters, directory=controller.directory)
    sent = controller.requests(rq.Generate)
    assert sorted(request.adapter for request in sent) == ["reverse"] * 3 + ["upper"] * 3
    assert {(request.prompt, request.sampling.max_tokens) for request in sent} == {("p", 2)}
    assert (result["requests"], result["errors"]) == (6, {})
    assert result["tokens_per_s"] == pytest.approx(2 * result["requests_per_s"])
    assert set(result["first_token"]) == {"p50", "p90", "p99"}


def test_errors_are_counted_by_code(controller):
    refuse_all(controller)
    takes = itertools.cycle((controller.answers[rq.Generate], controller._generate))

    def alternate(request):
        return next(takes)(request)

    controller.answers[rq.Generate] = alternate
    result = run("bench", "--requests", "4", "--concurrency", "1", directory=controller.directory)
    assert result.exit_code == 0, result.output
    assert "L015 2" in result.stdout


def test_a_load_without_an_answer_ends_with_the_error(controller):
    refuse_all(controller)
    result = run("bench", "--requests", "3", directory=controller.directory)
    assert result.exit_code == ExitCode.NO_ROOM
    assert "L015" in result.stderr
    assert "too many" in result.stderr
    assert result.stdout == ""


def test_the_table_has_milliseconds(controller):
    result = run("bench", "--requests", "2", directory=controller.directory)
    assert result.exit_code == 0, result.output
    assert "to the first token" in result.stdout
    assert [request.adapter for request in controller.requests(rq.Generate)] == [None, None]


def test_quantiles_are_measured_values():
    assert quantiles([]) == {}
    assert quantiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert quantiles([float(n) for n in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_two_runs_are_compared(controller, tmp_path):
    options = ("--requests", "2", "--ignore-eos")
    first = run("bench", *options, "--json", directory=controller.directory)
    assert all(one.sampling.ignore_eos for one in controller.requests(rq.Generate))
    (tmp_path / "first.json").write_text(first.stdout)
    words = ("--compare", str(tmp_path / "first.json"))
    assert "%)" in run("bench", *options, *words, directory=controller.directory).stdout
    (tmp_path / "first.json").write_text("{}")
    refused = run("bench", *options, *words, directory=controller.directory)
    assert refused.exit_code == ExitCode.USAGE


def test_an_interruption_prints_what_was_measured(controller):
    answer, count = controller._generate, itertools.count()

    def some(request):
        return answer(request) if next(count) < 3 else None

    controller.answers[rq.Generate] = some
    words = ("bench", "--requests", "9", "--concurrency", "1", "--json")
    process = start_command(*words, directory=controller.directory)
    # The fourth request is not answered.
    assert wait_until(lambda: len(controller.requests(rq.Generate)) > 3)
    process.send_signal(signal.SIGINT)
    result, text = process.communicate(timeout=HANG_S)
    assert process.returncode == ExitCode.INTERRUPTED
    assert json.loads(result)["answered"] == 3
    assert "3 of 9 were answered" in text
