"""Tests of the program `loradock`: what it imports, and its version."""

import re
import subprocess
import sys
import tomllib

import typer

import loradock
from loradock.cli.help import commands_of, summary
from loradock.cli.main import COMMANDS, VERSION, app, load
from tests.support.simulation.command_runs import ROOT, run


def test_it_starts_without_heavy_modules():
    heavy = ["torch", "transformers", "zmq", "structlog", "transitions", "asyncio", "rich"]
    heavy += ["loradock.cli.serve.command", "loradock.cli.adapters"]
    code = f"""
import atexit, sys
from loradock.cli.main import app
atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))
app()
"""
    listed = subprocess.run(
        [sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout.splitlines()[-1] == "[]"


def test_the_overview_has_each_command_with_the_summary_of_its_page():
    commands = typer.main.get_command(app).commands
    assert {entry.name for panel in COMMANDS.values() for entry in panel} == set(commands)
    for panel in COMMANDS.values():
        for entry in panel:
            assert entry.summary == summary(commands[entry.name])
            assert set(commands_of(load, entry.module)) <= set(commands)


def test_the_version_is_written_in_one_place():
    assert run("--version").stdout == f"loradock {VERSION}\n"
    assert loradock.__version__ == VERSION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    source = project["tool"]["setuptools"]["dynamic"]["version"]
    assert source == {"attr": "loradock.messages.VERSION"}


def commands_below(name, command):
    """Yield the words and the object of each command that is no group."""
    for each, one in getattr(command, "commands", {}).items():
        yield from commands_below(f"{name} {each}", one)
    if not hasattr(command, "commands"):
        yield name, command


def test_every_command_has_json_for_programs():
    for name, command in commands_below("loradock", typer.main.get_command(app)):
        assert any("--json" in one.opts for one in command.params), name


def test_help_says_what_a_value_is_and_not_its_type():
    for name, _ in commands_below("", typer.main.get_command(app)):
        page = run(*name.split(), "--help").stdout
        assert not re.search(r"<(int|str|path|float)", page), name
        usage = page.partition("\n")[0]
        assert "[[" not in usage, name
        assert usage.count("...") <= 1, name
