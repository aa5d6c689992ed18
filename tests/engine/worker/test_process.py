"""The start of the engine process: wrong options end it, and what it makes is not traversed."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import Conflict
from loradock.engine.worker import process
from loradock.engine.worker.engine import Engine
from loradock.messages.engine_options import (
    EngineOptions,
    EngineProcess,
    EngineStart,
    LoRAOptions,
)
from loradock.processes import process_log
from loradock.processes.subprocesses import EXIT_CONFIG
from tests.support.plain_logs import reset_logs
from tests.support.simulation.key_examples import engine_keys

pytest_plugins = ("tests.support.engine.engine_fixtures",)


@pytest.fixture
def _default_logging() -> Iterator[None]:
    """`main` logs to the stderr of its test, which is closed after the test."""
    yield
    reset_logs()


@pytest.mark.usefixtures("_default_logging")
def test_wrong_options_end_the_start_with_an_error(
    tmp_path: Path, model_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    right = EngineStart(
        connect=f"ipc://{tmp_path}/s", model=str(model_directory), **engine_keys(tmp_path / "d")
    )
    roots = (str(tmp_path),)
    for start, lora, engine, text in [
        ({"connect": "inproc://x"}, {}, {}, "must be an ipc:// or tcp:// address"),
        ({}, {"max_lora_rank": 7}, {}, "max_lora_rank"),
        ({}, {"lora_dtype": "int8"}, {}, "lora_dtype"),
        ({}, {}, {"device": "abacus"}, "abacus"),
        ({"model": str(tmp_path)}, {}, {}, "config.json"),
        ({}, {"target_modules": ("nothing",)}, {}, "nothing"),
        ({"adapter_roots": roots}, {"default_mm_loras": {"image": "/etc"}}, {}, "image=/etc"),
        ({"key": str(tmp_path / "nothing")}, {}, {}, "No such file"),
        ({"server_key": "/dev/null"}, {}, {}, "not a regular file"),
        ({}, {"default_mm_loras": {"image": "a"}}, {}, "without an adapter root"),
        # A missing default adapter is logged; the wrong device ends the start.
        (
            *({"adapter_roots": roots}, {"default_mm_loras": {"image": "a"}}, {"device": "x"}),
            "a default adapter is not there",
        ),
    ]:
        options = EngineProcess(
            start=msgspec.structs.replace(right, **start),
            lora=LoRAOptions(**lora),
            engine=EngineOptions(**engine),
        )
        assert process.run(options) == EXIT_CONFIG
        process_log.flush()
        assert text in capfd.readouterr().err


@pytest.mark.usefixtures("_default_logging")
@pytest.mark.parametrize("argument", ["", "{}", '{"start": {"connect": 1}}'])
def test_an_argument_that_can_not_be_read_ends_the_start(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["process", argument])
    assert process.main() == EXIT_CONFIG


def test_every_start_of_an_engine_has_another_id() -> None:
    found = [process.new_engine_id("l") for _ in range(2)]
    assert found[0] != found[1]
    assert all(one.startswith("l") for one in found)


@pytest.mark.usefixtures("_default_logging")
def test_garbage_collections_traverse_nothing_that_a_start_made(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection holds the interpreter's lock, so its objects are those of requests."""
    engines: list[Engine] = []
    traversed: list[object] = []

    def serve(engine: Engine, *_: object) -> None:
        engines.append(engine)
        kinds = (Engine, torch.nn.Module, torch.nn.Parameter)
        traversed.extend(one for one in gc.get_objects() if issubclass(type(one), kinds))

    monkeypatch.setattr(process, "_serve", serve)
    start = EngineStart(
        connect=f"ipc://{tmp_path}/s", model=str(model_directory), **engine_keys(tmp_path / "d")
    )
    options = EngineProcess(start=start, engine=EngineOptions(device="cpu"))
    frozen = gc.get_freeze_count()
    try:
        assert process.run(options) == 0
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
    assert len(engines) == 1
    assert not traversed


def test_a_default_adapter_that_is_being_written_does_not_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(path: str, *_: object, **__: object) -> None:
        raise Conflict(f"{path} changes while it is read")

    monkeypatch.setattr(process, "open_adapter", changing)
    config = LoRAConfig(default_mm_loras={"image": "x"})
    process._check_default_adapters(EngineConfig(tmp_path, (tmp_path,)), config)
