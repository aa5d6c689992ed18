"""The commands of the documents for users, executed block by block on one server.

The server is a process, the other commands run in this one.
"""

import asyncio
import io
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from examples.demo_arrival import show_arrivals
from loradock.client import AsyncClient
from tests.support.engine.serve_process import serve, status_once
from tests.support.parallel.processes import ROOT, TINY
from tests.support.simulation.command_runs import run
from tests.support.waiting import HANG_S

DOCUMENTS: Final = ("README.md", "docs/operating.md", "docs/quickstart.md")
_BLOCK: Final = re.compile(r"```console\n(.*?)```", re.S)
_PLACEHOLDER: Final = re.compile(r"\b(HOST|PORT|DIRECTORY|FILE|NAME|DIR)\b")


class Step:
    """A command of a block, and the lines that are shown after it."""

    def __init__(self, words: str, shown: list[str]) -> None:
        self.words = words
        self.shown = shown


def blocks(document: str) -> list[list[Step]]:
    """The console blocks of a document, without those of other programs."""
    found = []
    for block in _BLOCK.findall((ROOT / document).read_text()):
        steps: list[Step] = []
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:].partition(" #")[0].strip(), []))
            elif steps:
                steps[-1].shown.append(line)
        if steps and all(one.words.startswith("loradock ") for one in steps):
            found.append(steps)
    return found


def commands(words: str) -> Iterator[list[str]]:
    for command in words.removesuffix("&").split("&&"):
        _, *arguments = shlex.split(command)
        yield arguments


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("served") / "d"
    options = ("--max-loras", "3", "--max-lora-rank", "64", "--adapter", "reverse=reverse")
    with serve(found, *options) as process:
        status_once(found, lambda status: bool(status.engine_id))
        yield found
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_commands_of_a_document_do_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path, document: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    executed = 0
    for steps in blocks(document):
        for step in steps:
            if step.words.endswith("&"):
                assert_is_an_option_of_serve(step.words)
                continue
            for arguments in commands(step.words):
                if arguments[0] == "stop" or _PLACEHOLDER.search(step.words):
                    continue
                result = run(*arguments, directory=directory)
                assert result.exit_code == 0, (step.words, result.output)
                executed += 1
            if step.shown:
                assert result.stdout.splitlines() == step.shown, step.words
    assert executed >= 3


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_command_after_the_start_of_a_server_waits_until_it_is_ready(document: str) -> None:
    text = (ROOT / document).read_text()
    starts = 0
    for block in _BLOCK.findall(text):
        lines = [line for line in block.splitlines() if line.startswith("$ ")]
        for line, following in pairwise(lines):
            if line.startswith("$ loradock serve") and line.endswith("&"):
                starts += 1
                assert following.startswith("$ loradock ready"), line
    assert starts


def assert_is_an_option_of_serve(words: str) -> None:
    """The paths exist, and the options are known; the fixture has started such a server."""
    (arguments,) = commands(words)
    assert arguments[0] == "serve"
    shown = run("serve", "--help").stdout
    for place, word in enumerate(arguments):
        if word.startswith("--"):
            assert f"{word} " in shown
        if word in ("--model", "--adapter-root"):
            assert (ROOT / arguments[place + 1]).is_dir()


def test_the_default_output_fits_the_context(directory: Path) -> None:
    words = " ".join(["a"] * 300)
    result = run("generate", words, directory=directory)
    assert result.exit_code == 2
    assert re.search(r"the prompt is too long: \d+ tokens > \d+ maximum", result.stderr)
    long_enough = run("generate", " ".join(["a"] * 220), "--json", directory=directory)
    assert long_enough.exit_code == 0, long_enough.output
    too_many = run("generate", "a", "--max-tokens", "512", directory=directory)
    assert "lower max_tokens to" in too_many.stderr


def test_arrivals_of_the_demo_are_shown_and_their_outputs_are_right(directory: Path) -> None:
    console = Console(file=io.StringIO(), width=200)

    async def show() -> list[str]:
        async with AsyncClient(directory, timeout_s=HANG_S) as client:
            await asyncio.gather(*(client.load(name) for name in ("reverse", "upper", "double")))
            return await show_arrivals(client, console)

    assert asyncio.run(show()) == []
    shown = console.file.getvalue()
    for title in ("before", "meanwhile"):
        assert re.search(rf"{title} +median +\d+\.\d ms", shown), shown
    assert re.search(r"both requests were answered within \d+ ms", shown)


def test_a_stop_ends_the_server_and_its_engine_is_not_lost(directory: Path) -> None:
    assert run("stop", "--timeout", str(HANG_S), directory=directory).exit_code == 0
    log = directory.with_suffix(".log").read_text()
    assert "a client has stopped the server" in log
    assert "engine lost" not in log
    assert "\x1b" not in log
    assert TINY.is_dir()
