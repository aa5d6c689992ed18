"""Tests of `generate` and `events` against a stand-in: requests, output and errors."""

import json
import signal

import msgspec
import pytest
from typer.testing import CliRunner

from loradock.cli.exit_codes import ExitCode
from loradock.cli.main import app
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import MultimodalPrompt, Sampling, Structure
from tests.support.simulation.command_runs import run, run_json, start_command
from tests.support.simulation.standin_controller import PROMPT, StandIn
from tests.support.waiting import HANG_S, wait_until

PNG, JPEG = b"\x89PNG", b"\xff\xd8\xff"


@pytest.fixture
def controller(tmp_path):
    with StandIn(tmp_path) as stand_in:
        (tmp_path / "a.png").write_bytes(PNG)
        (tmp_path / "b.jpeg").write_bytes(JPEG)
        (tmp_path / "empty.png").touch()
        yield stand_in


def generate(controller, prompt, *images, stdin=None):
    options = [word for name in images for word in ("--image", str(controller.directory / name))]
    arguments = ["--dir", str(controller.directory), "generate", prompt, *options]
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments, input=stdin)


@pytest.mark.parametrize("prompt", ["<image> and <image>", "-"])
def test_images_are_sent_with_the_text_in_order(controller, prompt):
    result = generate(controller, prompt, "b.jpeg", "a.png", stdin="<image> and <image>")
    assert result.exit_code == 0, result.output
    assert result.stdout == "one\n"
    (request,) = controller.requests(rq.Generate)
    assert request.prompt == MultimodalPrompt("<image> and <image>", (JPEG, PNG))


@pytest.mark.parametrize(
    ("image", "text"), [("none.png", "does not exist"), (".", "directory"), ("empty.png", "empty")]
)
def test_a_file_that_is_no_image_is_wrong_usage(controller, image, text):
    result = generate(controller, "<image>", "a.png", image)
    assert result.exit_code == ExitCode.USAGE
    assert text in result.stderr
    assert not controller.received


def test_the_help_explains_placeholders():
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["generate", "--help"])
    assert "placeholder of the model" in result.stdout
    assert "--image" in result.stdout


def test_generate_prints_text_and_json_lines(controller):
    arguments = ["generate", "p", "--adapter", "upper", "--max-tokens", "2", "--seed", "3"]
    arguments += ["--stop", "x", "--stop", "y", "--top-k", "4", "--top-p", "0.5"]
    person = run(*arguments, directory=controller.directory)
    assert (person.stdout, person.exit_code) == ("on\n", 0)
    *chunks, result = run_json(*arguments, directory=controller.directory)
    assert [chunk["text"] for chunk in chunks] == ["o", "n"]
    assert (result["type"], result["output_tokens"]) == ("GenerationDone", 2)
    sampling = Sampling(max_tokens=2, seed=3, top_k=4, top_p=0.5, stop=("x", "y"))
    assert {request.sampling for request in controller.requests(rq.Generate)} == {sampling}


def test_generate_reads_stdin_and_uses_the_base_model_by_default(controller):
    result = run("generate", "-", directory=controller.directory, stdin="from stdin\n")
    assert result.stdout == "one\n"
    (request,) = controller.requests(rq.Generate)
    assert (request.prompt, request.adapter) == ("from stdin\n", None)


def test_generate_makes_the_requested_number_of_attempts(controller):
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


def test_past_events_start_after_the_given_number_and_end(controller):
    publish(controller, 3)
    everything = run("events", "--no-follow", directory=controller.directory).stdout.splitlines()
    assert [int(line.split()[0]) for line in everything] == [1, 2, 3]
    assert everything[0].endswith("Z  AdapterCached         adapter=upper duration=0ms")
    later = run_json("events", "--since", "2", "--no-follow", directory=controller.directory)
    assert [(item["seq"], item["event"]) for item in later] == [
        (3, {"type": "AdapterCached", "adapter": "upper", "duration_ns": 0})
    ]


def test_a_number_past_the_newest_event_is_told_and_waited_for(controller):
    publish(controller, 3)
    past = ("events", "--since", "5", "--no-follow")
    ended = run(*past, directory=controller.directory)
    assert ended.exit_code == ExitCode.NOT_FOUND
    assert "event 5 is not there yet: the newest is event 3" in ended.stderr
    assert ended.stdout == ""
    process = start_command("events", "--since", "5", "--json", directory=controller.directory)
    wait_until(lambda: controller.requests(rq.FetchEvents))
    publish(controller, 3)
    assert json.loads(process.stdout.readline())["seq"] == 6
    process.send_signal(signal.SIGINT)
    process.wait(HANG_S)


def test_lost_events_are_reported(controller):
    publish(controller, 3)
    controller.first_seq = 3
    output = run("events", "--no-follow", directory=controller.directory).stdout
    assert output.startswith("events 1 to 2 are not kept")
    lines = run_json("events", "--no-follow", directory=controller.directory)
    assert lines[0] == {"type": "Gap", "expected": 1, "found": 3}


def test_events_are_followed_until_interrupted(controller):
    publish(controller, 1)
    process = start_command("events", "--since", "0", "--json", directory=controller.directory)
    assert json.loads(process.stdout.readline())["seq"] == 1
    publish(controller, 1)
    assert json.loads(process.stdout.readline())["seq"] == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in errors


def test_interrupting_a_generation_cancels_it(controller):
    controller.answers[rq.Generate] = lambda request: None
    process = start_command("generate", "p", directory=controller.directory)
    while not controller.requests(rq.Generate):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == ExitCode.INTERRUPTED
    (generation,) = controller.requests(rq.Generate)
    (cancelled,) = controller.requests(rq.CancelGeneration)
    assert cancelled.target == generation.request_id


def test_every_field_of_sampling_has_an_option(controller):
    arguments = [
        *("generate", "p", "--max-tokens", "2", "--temperature", "0.5", "--top-k", "4"),
        *("--top-p", "0.5", "--seed", "3", "--stop", "x", "--min-p", "0.1", "-n", "2"),
        *("--presence-penalty", "0.5", "--frequency-penalty", "-0.5"),
        *("--repetition-penalty", "1.5", "--logit-bias", "7=-2.5", "--min-tokens", "1"),
        *("--stop-token-id", "5", "--ignore-eos", "--include-stop", "--logprobs", "1"),
        *("--prompt-logprobs", "2", "--regex", "a+", "--priority", "-3"),
        "--special-tokens",
    ]
    run(*arguments, directory=controller.directory)
    (request,) = controller.requests(rq.Generate)
    changed = [
        field.name
        for field in msgspec.structs.fields(Sampling)
        if getattr(request.sampling, field.name) == field.default
    ]
    assert changed == []
    assert request.sampling.structure == Structure("regex", "a+")
    assert request.sampling.logit_bias == ((7, -2.5),)
    assert request.priority == -3


def test_structures_are_given_as_text_or_file(controller):
    schema = controller.directory / "schema.json"
    schema.write_text('{"type": "object"}')
    for option, expected in (
        (("--json-schema", str(schema)), Structure("json_schema", '{"type": "object"}')),
        (("--json-schema", "{}"), Structure("json_schema", "{}")),
        (("--choice", "a", "--choice", "b"), Structure("choice", choices=("a", "b"))),
    ):
        run("generate", "p", *option, directory=controller.directory)
        assert controller.requests(rq.Generate)[-1].sampling.structure == expected


@pytest.mark.parametrize(
    "options",
    [
        ("--regex", "a", "--choice", "b"),
        ("--json-schema", "no-such-file"),
        ("--logit-bias", "7"),
        ("--logprobs", "21"),
    ],
)
def test_wrong_sampling_options_are_wrong_usage(controller, options):
    result = run("generate", "p", *options, directory=controller.directory)
    assert result.exit_code == ExitCode.USAGE
    assert not controller.received


def test_several_outputs_and_their_log_probabilities_are_printed_whole(controller):
    arguments = ["generate", "p", "-n", "2", "--max-tokens", "1", "--logprobs", "2"]
    result = run(*arguments, "--prompt-logprobs", "0", directory=controller.directory)
    (token, text), *_ = controller.output
    entry = f"{token:>7}    -1.5000 rank 2  {token + 1} -0.2500  {token} -1.5000"
    prompt = [f"prompt {token:>7}    -1.5000 rank 2" for token in PROMPT[1:]]
    assert result.stdout.splitlines() == [
        *(f"[0] {text}", f"output 0 {entry}", f"[1] {text}", f"output 1 {entry}"),
        *prompt,
    ]
