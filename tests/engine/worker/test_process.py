"""The start of the engine process: wrong options end it, and what it makes is not traversed."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import Conflict
from loradock.engine.worker import process
from loradock.engine.worker.engine import Engine
from loradock.processes import process_log
from tests.support.plain_logs import reset_logs
from tests.support.simulation.key_examples import engine_arguments

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
    right = ["--connect", f"ipc://{tmp_path}/s", "--model", str(model_directory)]
    right += engine_arguments(tmp_path / "d")
    for options, text in [
        (["--connect", "inproc://x"], "only ipc:// and tcp://"),
        (["--log-format", "xml"], "only console and json"),
    ]:
        with pytest.raises(SystemExit) as caught:
            process.main([*right, *options])
        assert caught.value.code == 2
        assert text in capfd.readouterr().err
    for options, status, text in [
        (["--max-lora-rank", "7"], 2, "max_lora_rank"),
        (["--lora-dtype", "int8"], 2, "lora_dtype"),
        (["--device", "abacus"], 2, "abacus"),
        (["--model", str(tmp_path)], 2, "config.json"),
        (["--target-module", "nothing"], 2, "nothing"),
        (["--adapter-root", str(tmp_path), "--default-mm-lora", "image=/etc"], 2, "image=/etc"),
        (["--key", str(tmp_path / "nothing")], 2, "No such file"),
        (["--server-key", "/dev/null"], 2, "not a regular file"),
        (["--default-mm-lora", "image=a"], 2, "below none of the adapter roots"),
        # A missing default adapter is logged; the wrong device ends the start.
        (
            [*("--adapter-root", str(tmp_path), "--default-mm-lora", "image=a", "--device", "x")],
            *(2, "a default adapter is not there"),
        ),
    ]:
        assert process.main([*right, *options]) == status
        process_log.flush()
        assert text in capfd.readouterr().err


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
    options = ["--connect", f"ipc://{tmp_path}/s", "--model", str(model_directory)]
    options += [*engine_arguments(tmp_path / "d"), "--device", "cpu"]
    frozen = gc.get_freeze_count()
    try:
        assert process.main(options) == 0
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
