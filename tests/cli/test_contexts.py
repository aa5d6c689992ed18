"""Named servers: which server a command is for, and that its name is shown."""

import json
import re

import pytest
from typer.testing import CliRunner

from loradock.cli.contexts import contexts_path
from loradock.cli.exit_codes import ExitCode
from loradock.cli.main import app


@pytest.fixture(autouse=True)
def configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("LORADOCK_DIR", "LORADOCK_ADDRESS", "LORADOCK_CONTEXT"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_a_named_server_is_used_and_shown_in_errors(controller, tmp_path):
    assert run("context", "add", "here", "--dir", str(controller.directory)).exit_code == 0
    assert run("context", "add", "gone", "--dir", str(tmp_path / "gone")).exit_code == 0
    assert run("--context", "here", "status").exit_code == 0
    assert run("status", "--context=here", "--json").exit_code == 0
    refused = run("status", "--context", "gone")
    assert refused.exit_code == ExitCode.UNREACHABLE
    assert refused.stderr.startswith("[gone] L011")
    error = json.loads(run("status", "--context", "gone", "--json").stderr)["error"]
    assert error["context"] == "gone"


def test_the_selected_server_is_used_unless_another_is_named(controller, tmp_path):
    run("context", "add", "here", "--dir", str(controller.directory))
    assert run("context", "use", "here").exit_code == 0
    assert run("status").exit_code == 0
    assert re.search(r"^ here +\* ", run("context", "list").stdout, re.MULTILINE)
    assert run("status", "--dir", str(tmp_path / "none")).exit_code == ExitCode.UNREACHABLE
    assert json.loads(run("context", "use", "--json").stdout)["selected"] == ""
    run("context", "use", "here")
    forgotten = json.loads(run("context", "remove", "here", "--json").stdout)
    assert forgotten == {"selected": "", "servers": {}}


def test_what_is_no_server_is_refused():
    assert run("status", "--context", "none").exit_code == ExitCode.NOT_FOUND
    for arguments in (["a b", "--dir", "x"], ["a"], ["a", "--address", "tcp://127.0.0.1:1"]):
        assert run("context", "add", *arguments).exit_code == ExitCode.USAGE
    contexts_path().parent.mkdir(parents=True)
    contexts_path().write_text("{")
    refused = run("status")
    assert refused.exit_code == ExitCode.USAGE
    assert str(contexts_path()) in refused.stderr


def test_commands_on_files_refuse_a_server_elsewhere():
    for command in (["serve"], ["keys", "list"], ["replay"], ["log", "verify"]):
        refused = run(*command, "--address", "tcp://127.0.0.1:1")
        assert refused.exit_code == ExitCode.USAGE
        assert "is elsewhere" in refused.stderr
