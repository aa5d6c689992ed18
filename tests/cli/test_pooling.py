"""Tests of `embed` and `classify` against a stand-in: requests, output and errors."""

import json

import pytest
from typer.testing import CliRunner

from loradock.cli.exit_codes import ExitCode
from loradock.cli.main import app
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode


def run(controller, *arguments, stdin=None):
    return CliRunner().invoke(app, ["--dir", str(controller.directory), *arguments], input=stdin)


def test_embed_prints_vectors_as_json_and_similarities_as_a_table(controller):
    texts = ("eins", "zwei " * 40)
    result = run(controller, "embed", "--adapter", "upper", "--json", *texts)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "adapter": "upper",
        "vectors": [[0.0, 1.5], [1.0, 1.5]],
        "input_tokens": 5,
    }
    assert controller.requests(rq.Embed)[0].inputs == texts
    table = run(controller, "embed", *texts).stdout
    # cos((0, 1.5), (1, 1.5)) = 1.5 / |(1, 1.5)|
    assert "eins" in table
    assert "1.000" in table
    assert "0.832" in table
    assert "zwei zwei" in table
    assert "zwei " * 15 not in table


def test_classify_prints_scores_and_the_best_label(controller):
    result = run(controller, "classify", "--json", "eins")
    assert json.loads(result.stdout) == {
        "adapter": None,
        "labels": ["good", "bad"],
        "scores": [[0.0, 1.5]],
        "input_tokens": 5,
    }
    lines = run(controller, "classify", "-a", "upper", "eins").stdout.strip().splitlines()
    assert lines[0].split() == ["text", "best", "good", "bad"]
    assert lines[-1].split() == ["eins", "bad", "0.0000", "1.5000"]


@pytest.mark.parametrize("name", ["embed", "classify"])
def test_a_dash_reads_one_text_per_line(controller, name):
    result = run(controller, name, "-", "--json", stdin="eins\nzwei drei\n")
    assert result.exit_code == 0, result.output
    assert controller.received[0].inputs == ("eins", "zwei drei")
    empty = run(controller, name, "-", stdin="")
    assert empty.exit_code == ExitCode.USAGE
    assert "stdin is empty" in empty.stderr


def test_an_engine_with_another_task_is_an_error(controller):
    controller.answers[rq.Classify] = lambda r: rq.Refused(
        r.request_id, ErrorCode.NOT_SERVED, "this engine generates"
    )
    result = run(controller, "classify", "eins")
    assert result.exit_code == ExitCode.REFUSED
    assert "L016" in result.stderr
    assert "--task" in result.stderr
