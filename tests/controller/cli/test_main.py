"""Tests of the program `loradock`: what it imports, and its version."""

import subprocess
import sys
import tomllib

import loradock
from controller.cli.main import VERSION
from tests.support.simulation.command_runs import ROOT, run


def test_it_starts_without_heavy_modules():
    heavy = ["torch", "transformers", "zmq", "structlog", "transitions"]
    code = f"import sys, controller.cli.main; print([m for m in {heavy} if m in sys.modules])"
    listed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout == "[]\n"


def test_the_version_is_written_in_one_place():
    assert run("--version").stdout == f"loradock {VERSION}\n"
    assert loradock.__version__ == VERSION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    source = project["tool"]["setuptools"]["dynamic"]["version"]
    assert source == {"attr": "messages.version.VERSION"}
