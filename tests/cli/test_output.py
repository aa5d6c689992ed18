"""Tests of the lines that say how far a long command with `--json` is."""

import io
import json

import pytest

from loradock.cli import output
from tests.support.waiting import wait_until


@pytest.mark.parametrize("total", [0, 4])
def test_with_json_progress_is_a_line_of_json_again_and_again(monkeypatch, total):
    errors, answer = io.StringIO(), io.StringIO()
    monkeypatch.setattr(output, "PROGRESS_INTERVAL_S", 0.01)
    monkeypatch.setattr("sys.stderr", errors)
    monkeypatch.setattr("sys.stdout", answer)
    with output.Output(as_json=True).progress("replaying", total) as advance:
        advance(1)
        seen = errors.getvalue().count("\n")
        wait_until(lambda: errors.getvalue().count("\n") >= seen + 3)
    ended = errors.getvalue()
    lines = [json.loads(line)["progress"] for line in ended.splitlines()]
    assert {line["what"] for line in lines} == {"replaying"}
    assert lines[-1]["elapsed_s"] >= 0
    amount = lines[-1].get("done"), lines[-1].get("total")
    assert amount == ((1, 4) if total else (None, None))
    assert all(("left_s" in line) == bool(total) for line in lines)
    # It ends with the command, and stdout is left to the result.
    assert errors.getvalue() == ended
    assert not answer.getvalue()
