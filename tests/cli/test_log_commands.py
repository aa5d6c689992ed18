"""Tests of `replay` and of the commands on a log."""

import json
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from loradock.cli import log_commands
from loradock.cli.exit_codes import ExitCode
from loradock.cli.main import app
from loradock.cli.output import Output
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.segments import segment_paths
from loradock.controller.log.writer import Log
from loradock.messages.records import FORMAT, ControllerStarted, Header, Record
from loradock.messages.requests import LoadAdapter
from loradock.processes.subprocesses import EXIT_LOG
from tests.support.parallel.processes import controller
from tests.support.simulation import log_damages
from tests.support.simulation.log_examples import flip
from tests.support.simulation.shell_examples import RawClient

LIMITS = Limits(max_loras=2, max_cpu_loras=4)


def run(*arguments, directory):
    return CliRunner().invoke(app, ["--dir", str(directory), *arguments])


def write_log(directory, count, digests=True):
    """Write a log of `count` loads, each with the digest of the world before it."""
    controller = Controller(LIMITS, "lru")
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    with Log(directory / "log", header) as log:
        for number in range(1, count + 1):
            load = LoadAdapter(f"r-{number}", f"adapter-{number}")
            message = ControllerStarted(1) if number == 1 else load
            digest = controller.world.digest() if digests else "no such digest"
            log.append([Record(number, message, digest)], epoch=1)
            controller.handle(message, number)
    return controller


def test_replay_shows_the_adapters_and_compares_digests(tmp_path):
    controller = write_log(tmp_path, 5)
    person = run("replay", directory=tmp_path)
    assert person.exit_code == 0, person.output
    assert "adapter-2" in person.stdout
    for arguments in ((), (str(tmp_path),)):
        result = run("replay", *arguments, "--checked", "--json", directory=tmp_path)
        document = json.loads(result.stdout)
        assert document["digest"] == controller.world.digest()
        assert (document["inputs"], document["digests_compared"]) == (5, 5)
        assert document["divergence"] is None
        names = [view["adapter"] for view in document["adapters"]]
        assert names == [f"adapter-{number}" for number in range(2, 6)]


def test_replay_shows_an_earlier_moment(tmp_path):
    write_log(tmp_path, 5)
    document = json.loads(run("replay", "--until", "3", "--json", directory=tmp_path).stdout)
    assert document["inputs"] == 3
    assert [view["adapter"] for view in document["adapters"]] == ["adapter-2", "adapter-3"]


@pytest.mark.parametrize("words", [(), ("--until", "9"), ("--from-start",)])
def test_a_replay_shows_how_many_of_its_records_are_done(tmp_path, monkeypatch, words):
    write_log(tmp_path, 12)
    assert run("log", "compact", directory=tmp_path).exit_code == 0
    shown = []

    @contextmanager
    def progress(output, label, total=0, **options):
        shown.append(total)
        yield shown.append

    monkeypatch.setattr(Output, "progress", progress)
    monkeypatch.setattr(log_commands, "_RECORDS_PER_ADVANCE", 1)
    assert run("replay", *words, directory=tmp_path).exit_code == 0
    total, *done = shown
    # `compact` has made a snapshot, and these two need the records before it.
    assert total == sum(done) == {(): 0, ("--until", "9"): 9}.get(words, 12)


def test_replay_ends_with_a_divergence(tmp_path):
    write_log(tmp_path, 5, digests=False)
    result = run("replay", "--json", directory=tmp_path)
    assert result.exit_code == ExitCode.LOG
    assert json.loads(result.stdout)["divergence"]["seq"] == 1
    assert "before record 1 the digest was no such digest" in result.stderr


def test_an_intact_log_is_verified(tmp_path):
    write_log(tmp_path, 5)
    assert run("log", "verify", directory=tmp_path).exit_code == 0
    document = json.loads(run("log", "verify", "--json", directory=tmp_path).stdout)
    assert (document["records"], document["last_seq"], document["corruption"]) == (5, 5, None)
    repair = run("log", "repair", "--yes", "--json", directory=tmp_path)
    assert json.loads(repair.stdout) == {"corrupt": False, "repaired": False}
    assert repair.exit_code == 0


def corruption(directory):
    """Flip a bit in the middle of a log's only segment."""
    write_log(directory, 8)
    (path,) = segment_paths(directory / "log")
    flip(path, path.stat().st_size // 2)


def test_corruption_is_reported_and_cut_only_on_request(tmp_path):
    corruption(tmp_path)
    checked = run("log", "verify", "--json", directory=tmp_path)
    assert checked.exit_code == ExitCode.LOG
    seq = json.loads(checked.stdout)["corruption"]["seq"]
    assert run("replay", directory=tmp_path).exit_code == ExitCode.LOG

    plan = run("log", "repair", "--json", directory=tmp_path)
    assert plan.exit_code == ExitCode.LOG
    loss = f"the records from {seq} on are lost; the last that the files show is 8"
    assert loss in plan.stderr
    document = json.loads(plan.stdout)
    assert (document["corrupt"], document["repaired"], document["next_seq"]) == (True, False, seq)
    assert document["loss"] == loss
    assert run("log", "verify", directory=tmp_path).exit_code == ExitCode.LOG

    done = run("log", "repair", "--yes", "--json", directory=tmp_path)
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert (document["corrupt"], document["repaired"]) == (False, True)
    verified = json.loads(run("log", "verify", "--json", directory=tmp_path).stdout)
    assert (verified["corruption"], verified["last_seq"]) == (None, seq - 1)
    assert list((tmp_path / "log").glob("*.corrupt"))


@pytest.mark.parametrize(
    ("file", "damage"),
    [("segment 4", "lost"), ("segment 4", "duplicated"), ("segment 3", "a FIFO")],
)
def test_the_commands_lead_from_a_damaged_log_to_a_serving_controller(tmp_path, file, damage):
    log_damages.write_log(tmp_path / "log")
    log_damages.DAMAGES[damage](tmp_path / "log" / log_damages.FILES[file], tmp_path)
    limits = log_damages.history(log_damages.SEED, 100)[0]
    with controller(tmp_path, limits=limits) as process:
        assert process.wait() == EXIT_LOG
        assert "`loradock log repair` shows what can be done" in process.output()
        assert run("log", "verify", directory=tmp_path).exit_code == ExitCode.LOG
        shown = json.loads(run("log", "repair", "--json", directory=tmp_path).stdout)
        done = json.loads(run("log", "repair", "--yes", "--json", directory=tmp_path).stdout)
        assert done == shown | {"corrupt": False, "repaired": True}
        assert run("log", "verify", directory=tmp_path).exit_code == 0
        process.start()
        with RawClient(tmp_path) as client:
            assert client.status().seq >= done["next_seq"]


def test_a_log_in_use_is_not_repaired(tmp_path):
    corruption(tmp_path)
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    other = tmp_path / "other"
    with Log(other / "log", header):
        result = run("log", "repair", "--yes", directory=other)
    assert result.exit_code == ExitCode.REFUSED
    assert "another process writes this log" in result.stderr


@pytest.mark.parametrize("arguments", [("replay",), ("log", "verify"), ("log", "repair")])
def test_a_directory_without_a_log_is_an_error(tmp_path, arguments):
    result = run(*arguments, directory=tmp_path)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "there is no log at" in result.stderr
    assert "Traceback" not in result.output
