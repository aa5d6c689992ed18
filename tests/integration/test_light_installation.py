"""A wheel without the libraries of the extra `serve`: clients, commands, controller and gateway."""

import json
import subprocess
from pathlib import Path

import pytest

from loradock import Client
from tests.support.installed import install
from tests.support.waiting import HANG_S

ENGINE = ("torch", "transformers", "triton", "safetensors", "re2", "PIL", "numpy")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("light"), ENGINE)


def refusal(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_what_needs_an_engine_names_the_extra(programs: Path, tmp_path: Path) -> None:
    serve = ("serve", "--model", "m", "--dir", str(tmp_path))
    status, text = refusal(programs / "loradock", *serve)
    assert status == 2
    assert "an engine needs torch and transformers" in text
    assert "pip install 'loradock[serve]'" in text
    for name in ("LoRAModelManager", "PEFTHelper", "LoRAMapping", "EngineConfig"):
        _, text = refusal(programs / "python", "-c", f"from loradock import {name}")
        assert text.endswith("needs torch: pip install 'loradock[serve]'\n")


def test_a_controller_and_a_gateway_serve_without_an_engine(programs: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = [programs / "loradock", "--dir", directory, "serve", "--engine", "external"]
    server = subprocess.Popen([*command, "--http", "127.0.0.1:0", "--json"], stderr=subprocess.PIPE)
    assert server.stderr is not None
    try:
        # The gateway names the port that it got, once it accepts connections.
        assert any("url" in json.loads(line) for line in server.stderr)
        with Client(directory, timeout_s=HANG_S) as client:
            assert client.list().adapters == ()
        listed = [programs / "loradock", "--dir", directory, "list"]
        shown = subprocess.run(listed, capture_output=True, text=True, check=True)
        assert shown.stdout == "no adapters are known\n"
    finally:
        server.terminate()
        server.stderr.close()
        assert server.wait(HANG_S) == 0
