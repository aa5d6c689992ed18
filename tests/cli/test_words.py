"""The words of other programs: each works, or is answered with commands and options that exist."""

import re

import pytest
import typer

from loradock.cli.exit_codes import CommandError
from loradock.cli.main import app
from loradock.cli.words import ANSWERS, SAME, SERVE_ANSWERS, SERVE_TRUE, for_serve
from tests.support.simulation.command_runs import run

COMMANDS = typer.main.get_command(app).commands
SERVE = {flag for one in COMMANDS["serve"].params for flag in one.opts}
TYPED = {
    "model": (["tiny"], ["--model", "tiny"]),
    "port": (["--port", "9000"], ["--http", "127.0.0.1:9000"]),
    "port first": (["--port", "1", "tiny"], ["--model", "tiny", "--http", "127.0.0.1:1"]),
    "host first": (["--host=::", "tiny"], ["--model", "tiny", "--http", ":::8000"]),
    "host": (["--host=0.0.0.0"], ["--http", "0.0.0.0:8000"]),
    "both": (
        ["tiny", "--host", "::1", "--max-loras", "4", "--port=1"],
        ["--model", "tiny", "--max-loras", "4", "--http", "::1:1"],
    ),
    "enable": (["--enable-lora", "--max-cpu-loras", "9"], ["--max-cpu-loras", "9"]),
    "later": (["--check", "tiny"], ["--check", "--model", "tiny"]),
    "own": (["--adapter-root", "a", "b"], ["--adapter-root", "a", "b"]),
}


@pytest.mark.parametrize("word", SAME)
def test_a_word_of_another_program_is_a_command(word):
    assert word not in COMMANDS
    assert SAME[word] in COMMANDS
    page = run(word, "--help").stdout
    assert page == run(SAME[word], "--help").stdout
    assert f" {SAME[word]} " in page.partition("\n")[0]


@pytest.mark.parametrize("word", ANSWERS)
def test_another_word_is_answered_with_commands(word):
    assert word not in {**COMMANDS, **SAME}
    answer = run(word, "x")
    assert answer.exit_code == 2
    assert ANSWERS[word] in answer.stderr
    for command in re.findall(r"`loradock (?!--)([\w-]+)", ANSWERS[word]):
        assert command in COMMANDS


@pytest.mark.parametrize("name", TYPED)
def test_serve_takes_the_arguments_of_vllm(name):
    typed, meant = TYPED[name]
    assert for_serve(typed, frozenset({"--check"})) == meant
    assert {word for word in meant if word.startswith("--")} <= SERVE


@pytest.mark.parametrize("flag", SERVE_ANSWERS)
def test_an_option_that_serve_lacks_is_answered_with_options_that_it_has(flag):
    assert flag not in SERVE | SERVE_TRUE
    with pytest.raises(CommandError) as caught:
        for_serve([flag])
    assert set(re.findall(r"--[\w-]+", caught.value.hint)) <= SERVE


def test_host_and_port_exclude_http():
    with pytest.raises(CommandError, match="leave out --host"):
        for_serve(["--http", "127.0.0.1:1", "--port", "2"])


def test_help_is_a_command_and_has_a_short_option():
    assert run("help").stdout == run("--help").stdout == run("-h").stdout
    assert run("help", "load").stdout == run("load", "-h").stdout == run("load", "--help").stdout
