"""Runs of the command `loradock`: in this process, and as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from loradock.cli.main import app

ROOT = Path(__file__).parents[3]
COMMAND = """
import signal
from loradock.cli.main import app
# A shell makes its background processes ignore this signal, and tests may be one of them.
signal.signal(signal.SIGINT, signal.default_int_handler)
app(prog_name="loradock")
"""


def run(*arguments, directory="/nowhere", stdin=None):
    return CliRunner().invoke(app, ["--dir", str(directory), *arguments], input=stdin)


def run_json(*arguments, directory, stdin=None):
    """Return the stdout of a successful run: a JSON document per line.

    A run that takes long, as on a loaded machine, has its progress on stderr, and nothing else.
    """
    result = run(*arguments, "--json", directory=directory, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert all("progress" in json.loads(line) for line in result.stderr.splitlines())
    return [json.loads(line) for line in result.stdout.splitlines()]


def start_command(*arguments, directory, **options):
    """Start the command as a process of its own."""
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
