"""Tests of `log dump`, `export`, `import`, `compact`, `skip`, and of `verify` with snapshots."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loradock.cli.exit_codes import ExitCode
from loradock.cli.main import app
from loradock.controller.log.replay import replay
from loradock.controller.log.segments import read, segment_paths
from loradock.controller.log.snapshots import snapshot_path, snapshot_paths
from loradock.controller.log.writer import Log
from loradock.messages.records import InputSkipped
from tests.support.simulation.log_examples import flip
from tests.support.simulation.logged_histories import header_of, history, write_history


def run(directory: Path, *arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["--dir", str(directory), *arguments], input=given)


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_history(tmp_path / "log")
    return tmp_path


def test_a_dump_has_a_line_per_record(directory: Path) -> None:
    records = [record for _, _, record in read(directory / "log")]
    lines = [json.loads(line) for line in run(directory, "log", "dump").stdout.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(records) + 1))
    assert [line["input"]["type"] for line in lines] == [type(r.input).__name__ for r in records]
    assert [line["digest"] for line in lines] == [record.digest for record in records]
    part = run(directory, "log", "dump", "--from", "12", "--until", "14").stdout.splitlines()
    assert [json.loads(line) for line in part] == lines[11:14]


def test_an_export_is_imported(directory: Path, tmp_path: Path) -> None:
    file, new = tmp_path / "state.json", tmp_path / "new"
    assert run(directory, "log", "export", str(file)).exit_code == 0
    assert run(directory, "log", "export").stdout == file.read_text()
    # An existing file is not replaced.
    assert run(directory, "log", "export", str(file)).exit_code != 0
    made = document(run(new, "log", "import", str(file), "--json"))
    state = json.loads(file.read_text())
    assert (made["adapters"], made["is_exact"]) == (len(state["adapters"]), True)
    shown = document(run(new, "replay", "--json"))
    assert {a["adapter"] for a in shown["adapters"]} == {a["name"] for a in state["adapters"]}
    again = run(new, "log", "import", str(file))
    assert again.exit_code == ExitCode.REFUSED
    assert "has files already" in again.stderr
    other = run(tmp_path / "other", "log", "import", "-", given=file.read_text())
    assert other.exit_code == 0
    assert run(tmp_path / "third", "log", "import", "-", given="{}").exit_code == ExitCode.REFUSED


def test_compact_makes_a_snapshot_and_drops_files(directory: Path) -> None:
    log = directory / "log"
    last_seq = len(list(read(log)))
    before = document(run(directory, "replay", "--json"))
    made = document(run(directory, "log", "compact", "--log-keep-hours", "0", "--json"))
    assert (made["seq"], made["base"], made["removed"]) == (last_seq, 0, [])
    assert run(directory, "log", "compact", "--log-retention", "dorp").exit_code == ExitCode.USAGE
    after = document(run(directory, "replay", "--json"))
    assert (after["digest"], after["snapshot"]) == (before["digest"], last_seq)
    whole = document(run(directory, "replay", "--from-start", "--json"))
    assert (whole["digest"], whole["snapshot"]) == (before["digest"], 0)
    verified = document(run(directory, "log", "verify", "--json"))
    assert (verified["snapshots"], verified["snapshot_seq"]) == (1, last_seq)
    assert verified["records_since_snapshot"] == 0
    assert verified["newest_event"] == made["events_seq"] > 0


def test_verify_reports_a_bad_snapshot(directory: Path) -> None:
    assert run(directory, "log", "compact").exit_code == 0
    (path,) = snapshot_paths(directory / "log")
    flip(path, 100)
    result = run(directory, "log", "verify", "--json")
    assert result.exit_code == ExitCode.LOG
    assert str(path) in json.loads(result.stdout)["problems"][0]
    assert run(directory, "log", "compact").exit_code == 0
    assert run(directory, "log", "verify").exit_code == 0


def test_verify_reports_records_that_a_restart_would_miss(directory: Path) -> None:
    segment_paths(directory / "log")[0].unlink()
    result = run(directory, "log", "verify", "--json")
    assert result.exit_code == ExitCode.LOG
    assert "are missing" in json.loads(result.stdout)["problems"][0]


def test_a_skipped_record_is_as_if_it_had_never_come(directory: Path) -> None:
    log, seq = directory / "log", 3
    assert run(directory, "log", "compact").exit_code == 0
    last_seq = len(list(read(log)))
    shown = run(directory, "log", "skip", str(seq), "--json")
    assert shown.exit_code == ExitCode.REFUSED
    assert snapshot_paths(log) == [snapshot_path(log, last_seq)]
    done = document(run(directory, "log", "skip", str(seq), "--yes", "--json"))
    assert done["skipped_by"] == last_seq + 1
    assert snapshot_paths(log) == []
    *_, (_, _, record) = read(log)
    assert isinstance(record.input, InputSkipped)
    assert record.input.seq == seq
    # The digests after it were those of a history with it.
    assert replay(log, until=seq).digest != replay(log, until=seq - 1).digest
    for wrong in (last_seq + 1, last_seq + 9):
        assert run(directory, "log", "skip", str(wrong), "--yes").exit_code == ExitCode.LOG


@pytest.mark.parametrize("command", [("compact",), ("skip", "3", "--yes")])
def test_a_log_in_use_is_left_alone(directory: Path, command: tuple[str, ...]) -> None:
    with Log(directory / "log", header_of(history(3, 100)[0])):
        result = run(directory, "log", *command)
    assert result.exit_code == ExitCode.REFUSED
    assert "another process writes this log" in result.stderr


@pytest.mark.parametrize("command", ["dump", "export", "compact"])
def test_a_directory_without_a_log_is_an_error(tmp_path: Path, command: str) -> None:
    assert run(tmp_path, "log", command).exit_code == ExitCode.NOT_FOUND
