"""The blocks of code in the documents: each is executed, or says why not.

All pages share one server; the commands run in this process. The README's first use is also typed
into a shell, with a server of its own.
"""

import asyncio
import io
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console
from typer.main import get_command

from examples.demo_arrival import show_arrivals
from loradock.cli.main import app
from loradock.client import AsyncClient
from tests.support.document_runs import SharedServer, as_typed
from tests.support.documents import PAGES, Block, blocks_of, steps_of
from tests.support.parallel.processes import TINY
from tests.support.simulation.command_runs import run
from tests.support.sources import ROOT
from tests.support.waiting import HANG_S

EXECUTED: Final = ("console", "python", "toml")
SHOWN: Final = ("mermaid", "text")
"""What the generator of a page writes, and compares."""

_NOT_HERE: Final = re.compile(r"not run: .{10}|run by (?P<test>tests/\S+\.py)$")


def is_run_here(block: Block) -> bool:
    return block.language in EXECUTED and not _NOT_HERE.match(block.note)


WITH_BLOCKS: Final = [page for page in PAGES if any(map(is_run_here, blocks_of(page)))]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_executed_or_says_why_not(page: str) -> None:
    assert "\n\n    " not in re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    for block in blocks_of(page):
        elsewhere = _NOT_HERE.match(block.note)
        assert elsewhere or block.language in (*EXECUTED, *SHOWN), block
        if elsewhere and elsewhere["test"]:
            assert Path(page).name in (ROOT / elsewhere["test"]).read_text(), block


def options_of(command: Any) -> set[str]:
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_a_command_in_a_sentence_exists(page: str) -> None:
    root, text = get_command(app), (ROOT / page).read_text().replace("\n", " ")
    # Words of other programs, which `serve` knows too.
    others = {"--host", "--port", "--enable-lora"}
    for words in re.findall(r"`loradock ([^`]+)`", text):
        command: Any = root
        known = options_of(root) | others | {"--help"}
        for word in shlex.split(words):
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
                known |= options_of(command)
            elif word.startswith("--"):
                assert word.partition("=")[0] in known, words
        assert command is not root or words.startswith("--"), words


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    yield from SharedServer(tmp_path_factory.mktemp("served")).running()


@pytest.fixture(scope="module")
def directory(server: SharedServer) -> Path:
    return server.directory


@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if page != "README.md"])
def test_the_blocks_of_a_page_do_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: SharedServer, page: str
) -> None:
    reader = server.reader(tmp_path, monkeypatch)
    for block in filter(is_run_here, blocks_of(page)):
        reader.follow(block)


def test_the_first_use_runs_as_it_is_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LORADOCK_DIR", raising=False)
    as_typed([*filter(is_run_here, blocks_of("README.md"))], tmp_path)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_a_server_is_waited_for_and_ends_before_the_next(page: str) -> None:
    steps = [
        step.words
        for block in blocks_of(page)
        if block.language == "console" and is_run_here(block)
        for step in steps_of(block)
    ]
    runs = False
    for words, following in pairwise([*steps, ""]):
        if words.startswith("loradock serve") and words.endswith("&"):
            assert not runs, words
            runs = True
            assert not following or re.match("loradock ready|curl --retry", following), words
        runs = runs and words != "loradock stop"


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


def test_a_stop_ends_the_server_and_its_engine_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: SharedServer
) -> None:
    directory = server.directory
    assert run("stop", "--timeout", str(HANG_S), directory=directory).exit_code == 0
    log = directory.with_suffix(".log").read_text()
    assert "a client has stopped the server" in log
    assert "engine lost" not in log
    assert "\x1b" not in log
    assert TINY.is_dir()
    assert server.process is not None
    assert server.process.wait(HANG_S) == 0
    server.has_ended = True
    reader = server.reader(tmp_path, monkeypatch)
    for page in WITH_BLOCKS:
        for block in blocks_of(page):
            reader.follow(block)
