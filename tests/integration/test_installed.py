"""A wheel in an environment of its own: it serves next to hostile files and has full types."""

import subprocess
import sys
from pathlib import Path

import pytest

import loradock
from loradock import Client
from tests.support.installed import install, run
from tests.support.waiting import HANG_S

HOSTILE = (
    *("controller.py", "random.py", "torch.py", "loradock.py", "sitecustomize.py"),
    *("engine/__init__.py", "messages.py", "gateway/__init__.py"),
)
HOSTILE_CODE = """
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
raise SystemExit("this file must not run")
"""

PROGRAM = """
from collections.abc import Iterator
from typing import assert_type

from loradock import AsyncClient, AsyncEventStream, AsyncGeneration, Client, Embedding
from loradock import EventStream, Generation, LoRAConfig, LRUCacheLoRAModelManager, NoRoom
from loradock.messages.requests import AdapterDone, AdaptersListed, BatchDone, TokensStreamed

def blocking(client: Client) -> None:
    assert_type(client.load("x", path="y", replace=True, timeout_s=1.0), AdapterDone)
    assert_type(client.list(), AdaptersListed)
    assert_type(client.activate_batch(["x"]), BatchDone)
    assert_type(client.embed("text", attempts=2), Embedding)
    assert_type(client.generate("text", max_tokens=3, stop=("x",)), Generation)
    assert_type([chunk for chunk in client.generate("text")], list[TokensStreamed])
    assert_type(client.events(since=0), EventStream)
    client.load(1)  # type: ignore[arg-type]
    client.load("x", force=True)  # type: ignore[call-arg]
    client.generate("text", max_tokens="3")  # type: ignore[arg-type]
    client.generate("text", length=3)  # type: ignore[call-arg]

async def asynchronous(client: AsyncClient) -> None:
    assert_type(await client.load("x", path="y", replace=True, timeout_s=1.0), AdapterDone)
    assert_type(await client.embed("text", attempts=2), Embedding)
    assert_type(await client.generate("text", max_tokens=3, stop=("x",)), AsyncGeneration)
    assert_type([chunk async for chunk in client.generate("x")], list[TokensStreamed])
    assert_type(await client.events(since=0), AsyncEventStream)
    await client.load(1)  # type: ignore[arg-type]
    await client.load("x", force=True)  # type: ignore[call-arg]

assert_type(LoRAConfig(max_loras=3).max_loras, int)
assert_type(NoRoom("").retryable, bool)

def in_process(manager: LRUCacheLoRAModelManager) -> None:
    assert_type(manager.remove_adapter(1), bool)
    manager.remove_adapter("x")  # type: ignore[arg-type]
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("installed"))


def test_it_serves_the_example_next_to_files_with_the_names_of_its_modules(
    programs: Path, tmp_path: Path
) -> None:
    for name in HOSTILE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(HOSTILE_CODE)
    run(programs / "loradock", "example", "tiny", cwd=tmp_path)
    command = [programs / "loradock", "serve", "--model", "tiny/model", "--http", "127.0.0.1:0"]
    command += ["--adapter-root", "tiny/adapters", "--max-lora-rank", "64", "--slots", "2"]
    server = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        with Client(tmp_path / ".loradock", timeout_s=HANG_S) as client:
            client.load("reverse")
            assert client.generate("hello>", "reverse", max_tokens=8).text() == "olleh"
    finally:
        server.terminate()
        assert server.wait(HANG_S) == 0
    assert list(tmp_path.rglob("*.ran")) == []


def test_a_program_is_checked_with_full_types(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # Parsing torch and transformers would take most of a minute.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-torch.*,transformers.*]\n"
        "follow_imports = skip\nignore_missing_imports = true\n"
    )
    python = ("--python-executable", programs / "python", "--cache-dir", tmp_path / "cache")
    run(sys.executable, "-m", "mypy", *python, "program.py", cwd=tmp_path)


def test_names_are_imported_when_used(programs: Path, tmp_path: Path) -> None:
    code = "import sys; from loradock import Client, NoRoom; print('torch' in sys.modules)"
    assert run(programs / "python", "-c", code, cwd=tmp_path) == "False\n"
    for name in loradock.__all__:
        assert getattr(loradock, name) is not None
