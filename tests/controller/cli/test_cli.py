"""The command against a stand-in: what it asks, what it prints, how it exits."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from controller.cli.exit_codes import EXIT_OF, HINTS, MEANS, ExitCode
from controller.cli.main import VERSION, app
from controller.cli.sizes import format_size, parse_size
from messages import events as ev
from messages import requests as rq
from messages.errors import MEANINGS, ErrorCode
from tests.support.simulation.standin_controller import StandIn

ROOT = Path(__file__).parents[3]
COMMAND = """
import signal
from controller.cli.main import app
# Tests may run in the background of a shell, which has its children ignore this signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
app(prog_name="loradock")
"""


@pytest.fixture
def controller(tmp_path):
    with StandIn(tmp_path) as stand_in:
        yield stand_in


def run(*arguments, directory="/nowhere", stdin=None):
    return CliRunner().invoke(app, ["--dir", str(directory), *arguments], input=stdin)


def run_json(*arguments, directory, stdin=None):
    """The lines of a successful run's stdout, each one a JSON document."""
    result = run(*arguments, "--json", directory=directory, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]


def command(*arguments, directory, **options):
    """The command as a process of its own."""
    environment = os.environ | {"LORADOCK_DIR": str(directory)} | options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


# Sizes


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_is_read_as_it_was_meant(number, unit):
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit or "B")
    for text in (f"{number}{unit}", f" {number} {unit.lower()} ", f"{number}.0{unit.upper()}"):
        assert parse_size(text) == number * 1024**power


@given(st.integers(0, 2**53))
def test_a_size_is_shown_short_and_within_half_a_percent(size_bytes):
    shown = format_size(size_bytes)
    assert len(shown) <= len("0.976 TiB") or size_bytes >= 1000 * 1024**4
    number, unit = shown.split()
    read = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(read - size_bytes) <= 0.005 * size_bytes


def test_sizes_by_example():
    for text, size_bytes in {
        "64MiB": 64 << 20,
        "1.5 GiB": 3 << 29,
        "0.5KiB": 512,
        "2GB": 2 * 10**9,
        "3kB": 3000,
        "4096": 4096,
        "0.1 TB": 10**11,
    }.items():
        assert parse_size(text) == size_bytes
    for size_bytes, text in {
        0: "0 B",
        999: "999 B",
        1000: "0.977 KiB",
        1536: "1.5 KiB",
        64 << 20: "64 MiB",
        1 << 30: "1 GiB",
        1023 << 20: "0.999 GiB",
    }.items():
        assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("64M", "powers of 1024"),
        ("64 X", "powers of 1024"),
        ("0.3B", "whole number"),
        ("1.0001KiB", "whole number"),
        ("", "no size"),
        ("-1", "no size"),
        ("1e9", "no size|unit"),
        ("MiB", "no size"),
        ("1 2", "no size"),
        ("0x10", "no size"),
        ("٣", "no size"),
    ],
)
def test_what_is_no_size_is_told(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_size(text)


# Exit codes


def test_every_error_has_an_exit_code_and_a_hint_and_the_help_tells_them():
    assert set(EXIT_OF) == set(HINTS) == set(ErrorCode)
    assert set(MEANS) == set(ExitCode)
    told = run("--help").output
    for code, exit_code in EXIT_OF.items():
        assert code.value in MEANS[exit_code]
    for exit_code in ExitCode:
        assert re.search(rf"\b{exit_code.value}  {re.escape(MEANS[exit_code][:30])}", told)


@pytest.mark.parametrize("code", ErrorCode)
def test_a_refusal_ends_in_a_line_a_hint_and_its_exit_code(controller, code):
    def refuse(request):
        return rq.Refused(request.request_id, code, "found [this], allowed that")

    controller.answers[rq.LoadAdapter] = refuse
    result = run("load", "upper", directory=controller.directory)
    assert result.exit_code == EXIT_OF[code]
    assert result.stdout == ""
    line, hint = result.stderr.splitlines()
    assert line == f"{code} {MEANINGS[code].summary}: found [this], allowed that"
    assert hint.strip() == HINTS[code]
    told = run("load", "upper", "--json", directory=controller.directory)
    assert (told.exit_code, told.stdout) == (result.exit_code, "")
    error = json.loads(told.stderr)["error"]
    assert error["code"] == code
    assert error["exit"] == result.exit_code
    assert error["retryable"] == MEANINGS[code].retryable
    assert error["request_id"] == controller.received[-1].request_id


def test_no_controller_ends_in_unreachable(tmp_path):
    result = run("status", "--timeout", "0.05", directory=tmp_path)
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "L011" in result.stderr
    assert "loradock serve" in result.stderr
    assert "Traceback" not in result.output


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
        ["serve", "--model", "m", "--slots", "0"],
        ["serve", "--model", "m", "--slots", "9", "--host-adapters", "8"],
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


def test_a_directory_that_is_too_deep_is_told(tmp_path):
    result = run("status", directory=tmp_path / ("d" * 100))
    assert result.exit_code == ExitCode.USAGE
    assert "Unix allows 107" in result.stderr


# Requests

REQUESTS = [
    (["load", "upper", "--path", "a/b", "--replace"], rq.LoadAdapter("", "upper", "a/b", True)),
    (["stage", "upper", "--path", "a/b"], rq.StageAdapter("", "upper", "a/b")),
    (["activate", "upper"], rq.ActivateAdapter("", "upper")),
    (["activate", "upper", "reverse"], rq.ActivateBatch("", ("upper", "reverse"))),
    (["deactivate", "upper"], rq.DeactivateAdapter("", "upper")),
    (["hold", "upper"], rq.HoldAdapter("", "upper")),
    (["release", "upper"], rq.ReleaseAdapter("", "upper")),
    (["evict", "upper"], rq.EvictAdapter("", "upper")),
    (["remove", "upper", "--force"], rq.RemoveAdapter("", "upper", True)),
    (["cancel", "some-id"], rq.CancelGeneration("", "some-id")),
    (["list"], rq.ListAdapters("")),
    (["show", "upper"], rq.ShowAdapter("", "upper")),
    (["status"], rq.ShowStatus("")),
]


@pytest.mark.parametrize(("arguments", "asked"), REQUESTS, ids=lambda v: str(v)[:30])
def test_each_command_is_one_request_and_prints_its_answer(controller, arguments, asked):
    person = run(*arguments, "--timeout", "7", directory=controller.directory)
    assert person.exit_code == 0, person.output
    assert person.stdout.strip()
    (document,) = run_json(*arguments, "--timeout", "7", directory=controller.directory)
    first, second = controller.received
    assert document["type"]
    assert document["request_id"] == second.request_id
    for sent in (first, second):
        changes = {"request_id": sent.request_id}
        if hasattr(asked, "timeout_ms"):
            changes["timeout_ms"] = 7000
        assert sent == type(asked)(**(fields_of(asked) | changes))


def fields_of(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_what_a_person_sees(controller):
    def lines(*arguments):
        return run(*arguments, directory=controller.directory).stdout.split("\n")

    assert lines("activate", "upper")[0] == "upper: gpu-slot 2 (generation 5)"
    assert lines("load", "reverse")[0] == "reverse: evicted"
    table = "\n".join(lines("list"))
    assert re.search(r"reverse +evicted +- ", table)
    assert re.search(r"upper +gpu-slot +2 +8 +4 KiB +3 +\d+d ago", table)
    shown = "\n".join(lines("show", "upper"))
    assert re.search(r"fingerprint +(ab){16}\n", shown)
    assert re.search(r"held +no\n", shown)
    status = "\n".join(lines("status"))
    assert re.search(r"engine +e1 \(pid 4242\)\n", status)
    assert re.search(r"device +1 of 8 +4 KiB of 1 GiB", status)


def test_the_list_as_json_has_every_field(controller):
    (document,) = run_json("list", directory=controller.directory)
    assert [view["adapter"] for view in document["adapters"]] == ["reverse", "upper"]
    assert set(document["adapters"][0]) == set(rq.AdapterView.__struct_fields__)


# Streams


def test_generate_prints_text_and_json_lines(controller):
    arguments = ["generate", "p", "--adapter", "upper", "--max-tokens", "2", "--seed", "3"]
    arguments += ["--stop", "x", "--stop", "y", "--top-k", "4", "--top-p", "0.5"]
    person = run(*arguments, directory=controller.directory)
    assert (person.stdout, person.exit_code) == ("on\n", 0)
    *chunks, result = run_json(*arguments, directory=controller.directory)
    assert [chunk["text"] for chunk in chunks] == ["o", "n"]
    assert (result["type"], result["output_tokens"]) == ("GenerationDone", 2)
    sampling = rq.Sampling(max_tokens=2, seed=3, top_k=4, top_p=0.5, stop=("x", "y"))
    assert {request.sampling for request in controller.requests(rq.Generate)} == {sampling}


def test_generate_reads_stdin_and_uses_the_base_model_by_default(controller):
    result = run("generate", "-", directory=controller.directory, stdin="from stdin\n")
    assert result.stdout == "one\n"
    (request,) = controller.requests(rq.Generate)
    assert (request.prompt, request.adapter) == ("from stdin\n", None)


def test_generate_tries_again_if_asked_to(controller):
    refusals = []

    def answer(request):
        if not refusals:
            refusals.append(request)
            return rq.Refused(request.request_id, ErrorCode.NO_ROOM, "full")
        return rq.GenerationDone(request.request_id, None, "length", 1, 3)

    controller.answers[rq.Generate] = answer
    assert run("generate", "p", "--attempts", "2", directory=controller.directory).exit_code == 0


def publish(controller, count):
    controller.publish(*[ev.AdapterCached("upper") for _ in range(count)])


def test_events_of_the_past_end_and_begin_where_asked(controller):
    publish(controller, 3)
    everything = run("events", "--no-follow", directory=controller.directory).stdout.splitlines()
    assert [int(line.split()[0]) for line in everything] == [1, 2, 3]
    assert everything[0].endswith("Z  AdapterCached         adapter=upper")
    later = run_json("events", "--since", "2", "--no-follow", directory=controller.directory)
    assert [(item["seq"], item["event"]) for item in later] == [
        (3, {"type": "AdapterCached", "adapter": "upper"})
    ]


def test_events_that_are_gone_are_told(controller):
    publish(controller, 3)
    controller.first_seq = 3
    told = run("events", "--no-follow", directory=controller.directory).stdout
    assert told.startswith("events 1 to 2 are gone")
    lines = run_json("events", "--no-follow", directory=controller.directory)
    assert lines[0] == {"type": "Gap", "expected": 1, "found": 3}


def test_events_are_followed_until_interrupted(controller):
    publish(controller, 1)
    process = command("events", "--since", "0", "--json", directory=controller.directory)
    assert json.loads(process.stdout.readline())["seq"] == 1
    publish(controller, 1)
    assert json.loads(process.stdout.readline())["seq"] == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in errors


def test_interrupting_a_generation_cancels_it(controller):
    controller.answers[rq.Generate] = lambda request: None
    process = command("generate", "p", directory=controller.directory)
    while not controller.requests(rq.Generate):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    (asked,) = {request.request_id for request in controller.requests(rq.Generate)}
    assert [request.target for request in controller.requests(rq.CancelGeneration)] == [asked]


# The program itself


def test_it_starts_without_what_it_does_not_need():
    heavy = ["torch", "transformers", "zmq", "structlog", "transitions"]
    code = f"import sys, controller.cli.main; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_the_version_is_the_distributions():
    told = run("--version").stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert told == f"loradock {VERSION}\n" == f"loradock {project['version']}\n"


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
    process = command(directory=controller.directory, env=environment)
    told, errors = process.communicate(timeout=20)
    assert told.split() == completed
    assert errors == ""


def test_completion_is_silent_without_a_controller(tmp_path):
    environment = {
        "_LORADOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": "loradock show u",
        "COMP_CWORD": "2",
    }
    process = command(directory=tmp_path, env=environment)
    told, errors = process.communicate(timeout=20)
    assert (told.split(), errors) == ([], "")
