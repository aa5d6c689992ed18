"""Execution of the documents' blocks: on a server that all pages share, or as a person types them.

On the shared server the commands of LoRADock run in this process. `serve` only checks its options
there, and `stop` does nothing.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from loradock.cli.main import app
from loradock.client import Client
from tests.support.documents import Block, steps_of
from tests.support.engine.serve_process import serve, status_once, wait_for_gateway
from tests.support.parallel.processes import TINY
from tests.support.sources import ROOT
from tests.support.waiting import HANG_S

_OPTIONS: Final = (
    *("--max-loras", "3", "--max-lora-rank", "64", "--adapter", "reverse=reverse"),
    *("--http", "127.0.0.1:0", "--allow-runtime-lora-updating"),
)
_ENDED: Final = "run once the server has ended"


class SharedServer:
    """A server, and a folder that has what the pages take for granted, as `/srv`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder / "d"
        self.process: subprocess.Popen[bytes] | None = None
        self.has_ended = False
        self._texts = {
            "/srv": str(folder / "srv"),
            "/var/lib/loradock": str(self.directory),
            "server.key.pub": str(folder / "server.key.pub"),
        }

    def running(self) -> Iterator["SharedServer"]:
        """Serve until the end of the context."""
        for model in ("base", "llama"):
            shutil.copytree(TINY / "model", self.folder / "srv" / "models" / model)
        adapters = self.folder / "srv" / "adapters"
        shutil.copytree(TINY / "adapters" / "upper", adapters / "mine")
        _invoke("keys", "new", self.folder / "server.key")
        with serve(self.directory, *_OPTIONS, "--adapter-root", str(adapters)) as self.process:
            status_once(self.directory, lambda status: bool(status.engine_id))
            self._texts["http://127.0.0.1:8000/"] = wait_for_gateway(self.directory)
            yield self

    def reader(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> "Reader":
        """Return a reader with a folder of its own, for whom only `reverse` is loaded."""
        (folder / "examples").symlink_to(ROOT / "examples")
        monkeypatch.chdir(folder)
        monkeypatch.setenv("LORADOCK_DIR", str(self.directory))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        if not self.has_ended:
            with Client(self.directory, timeout_s=HANG_S) as client:
                for view in client.list().adapters:
                    client.remove(view.adapter, force=True)
                client.load("reverse")
        return Reader(self, monkeypatch)

    def text_of(self, text: str) -> str:
        """Return a text with the places of this server."""
        for documented, own in self._texts.items():
            text = text.replace(documented, own)
        return text


class Reader:
    """A person who follows a page."""

    def __init__(self, server: SharedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._monkeypatch = monkeypatch

    def follow(self, block: Block) -> None:
        """Execute a block, and compare what it shows."""
        if self._server.has_ended is not (block.note == _ENDED):
            return
        text = self._server.text_of(block.text)
        match block.language:
            case "python":
                exec(compile(text, "block", "exec"), {"__name__": "block"})
            case "toml":
                Path("serve.toml").write_text(text)
                self._check_start(["serve", "--config", "serve.toml"])
            case "console":
                for words, shown in steps_of(block._replace(text=text)):
                    stdout = "".join(map(self._run, words.split(" && ")))
                    assert not shown or stdout.splitlines() == shown, words

    def _run(self, words: str) -> str:
        """Return the stdout of one command."""
        match shlex.split(words.removesuffix("&")):
            case ["export", assignment]:
                self._monkeypatch.setenv(*assignment.split("=", 1))
            case ["cd", folder]:
                self._monkeypatch.chdir(folder)
            case ["loradock", "stop", *_]:
                pass
            case ["loradock", "serve", *_] as command:
                self._check_start(command[1:])
            case ["loradock", *arguments]:
                return _invoke(*arguments)
            case command:
                return run_program(*command)
        return ""

    def _check_start(self, arguments: Sequence[str]) -> None:
        """Check the options of `serve`, in a directory that no server has."""
        _invoke("--dir", self._server.folder / "new", *arguments, "--check")


def _invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, (arguments, result.output)
    return result.stdout


def run_program(*command: str, **environment: str) -> str:
    """Return the stdout of a program that this environment or the machine has."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


_MARK: Final = "@ step"


def as_typed(blocks: Sequence[Block], folder: Path) -> None:
    """Type blocks into a shell in a new folder, from the start of a server to its stop."""
    (folder / "examples").symlink_to(ROOT / "examples")
    steps = [step for block in blocks for step in steps_of(block)]
    assert steps[-1].words == "loradock stop"
    typed = [f"echo '{_MARK}'\n{step.words}" for step in steps]
    script = ["set -euo pipefail", 'trap "kill 0" ERR', *typed, "wait"]
    (folder / "typed.sh").write_text("\n".join([*script, ""]))
    _, *outputs = run_program("setsid", "--wait", "bash", "typed.sh").split(f"{_MARK}\n")
    for step, output in zip(steps, outputs, strict=True):
        assert not step.shown or output.splitlines() == step.shown, (step.words, output)
