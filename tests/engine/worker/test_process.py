"""The start of the engine process: wrong options end it with an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.worker import process
from tests.support.plain_logs import reset_logs

pytest_plugins = ("tests.support.engine.engine_fixtures",)


@pytest.fixture
def _default_logging() -> Iterator[None]:
    """`main` logs to the stderr of its test, which is closed after the test."""
    yield
    reset_logs()


@pytest.mark.usefixtures("_default_logging")
def test_wrong_options_end_the_start_with_an_error(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ["--connect", f"ipc://{tmp_path}/s", "--model", str(model_directory)]
    with pytest.raises(SystemExit) as caught:
        process.main([*right, "--connect", "tcp://127.0.0.1:1"])
    assert caught.value.code == 2
    assert "CURVE" in capsys.readouterr().err
    for options, status, text in [
        (["--max-lora-rank", "7"], 2, "max_lora_rank"),
        (["--lora-dtype", "int8"], 2, "lora_dtype"),
        (["--device", "abacus"], 1, "abacus"),
        (["--model", str(tmp_path)], 1, "config.json"),
        (["--target-module", "nothing"], 1, "nothing"),
        (["--adapter-root", str(tmp_path), "--default-mm-lora", "image=/etc"], 2, "image=/etc"),
        (["--default-mm-lora", "image=a"], 2, "below none of the adapter roots"),
        # A missing default adapter is logged; the wrong device ends the start.
        (
            [*("--adapter-root", str(tmp_path), "--default-mm-lora", "image=a", "--device", "x")],
            *(1, "a default adapter is not there"),
        ),
    ]:
        assert process.main([*right, *options]) == status
        assert text in capsys.readouterr().err
