"""The client in JavaScript: it has only docs/wire.md in common with the code.

`make node` installs its packages in a folder of their own; without them the test is skipped.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loradock.client import Client
from tests.support.engine.serve_process import serve, status_once
from tests.support.parallel.processes import ROOT
from tests.support.simulation.command_runs import run as run_command
from tests.support.simulation.remote_examples import free_address
from tests.support.waiting import HANG_S

PACKAGES = ROOT / ".venv-node" / "node_modules"
EXAMPLE = ROOT / "examples" / "node" / "client.js"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("node") / "d"
    with serve(found, "--max-loras", "2", "--max-lora-rank", "64"):
        status_once(found, lambda status: bool(status.engine_id))
        yield found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program in a folder with its packages."""
    if shutil.which("node") is None or not PACKAGES.is_dir():
        pytest.skip("Node or the packages of its client are not installed; see `make node`")
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    shutil.copy(EXAMPLE.with_name("package.json"), tmp_path)
    return Path(shutil.copy(EXAMPLE, tmp_path))


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["node", program, *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_it_loads_streams_and_has_all_events(directory: Path, program: Path) -> None:
    """Its subscription begins after the first events, so these are a gap that it heals."""
    with Client(directory, timeout_s=HANG_S) as client:
        client.load("upper")
        client.evict("upper")
        result = run(program, directory, "reverse", "hello>")
        wanted = list(client.events(since=0, follow=False))
    assert result.returncode == 0, result.stderr
    [documented] = code_blocks("examples/README.md", r"\$ cd examples/node[^\n]*\n\$ node[^\n]*\n")
    first = documented.splitlines()
    assert first[1:] == ["olleh", "GenerationDone: stop, 5 tokens"]
    lines = result.stdout.splitlines()
    assert lines[: len(first)] == first
    shown = lines[len(first) :]
    names = [f"{event.seq} {type(event.event).__name__}" for event in wanted]
    assert [" ".join(line.split()[:2]) for line in shown] == names


def code_blocks(document: str, start: str) -> list[str]:
    """Return the blocks of a document that begin with `start`, without that."""
    text = (ROOT / document).read_text()
    return re.findall(rf"```\w+\n{start}(.*?)```", text, flags=re.S)


def test_an_adapter_that_does_not_exist_is_refused_with_its_code(
    directory: Path, program: Path
) -> None:
    result = run(program, directory, "missing", "hello>")
    assert result.returncode == 1
    assert "L002: " in result.stderr


def test_the_documented_options_connect_with_a_key(tmp_path: Path, program: Path) -> None:
    """The block of docs/wire.md, with the keys that the commands make."""
    directory, key, address = tmp_path / "d", tmp_path / "key", free_address()
    for words in (("new", str(key)), ("allow", "me", f"{key}.pub", "--right", "read")):
        assert run_command("keys", *words, directory=directory).exit_code == 0
    [snippet] = code_blocks("docs/wire.md", r"(?=new Dealer)")
    script = program.with_name("keys.js")
    script.write_text(WITH_KEYS.replace("SNIPPET", snippet.strip().removesuffix(";")))
    with serve(directory, "--engine", "external", "--listen", address):
        result = run(script, address, key, directory / "keys" / "server.key.pub")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "AdaptersListed\n"


WITH_KEYS = """
import { readFileSync } from "node:fs";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const [address, ownFile, serverFile] = process.argv.slice(2);
const own = JSON.parse(readFileSync(ownFile));
const [curvePublicKey, curveSecretKey] = [own.public, own.secret];
const curveServerKey = readFileSync(serverFile, "ascii").trim();
const dealer = SNIPPET;
dealer.connect(address);
const head = Buffer.concat([Buffer.from("LD\\x02Q"), Buffer.alloc(16 + 12, 1)]);
await dealer.send(Buffer.concat([head, encode([["ListAdapters", "1"]])]));
const [frame] = await dealer.receive();
console.log(decode(frame.subarray(20))[0][0]);
dealer.close();
"""
