"""`serve`'s engine options and the engine's configurations are one list, told twice."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from typer.testing import CliRunner

from controller.cli.engine_options import HELP
from controller.cli.main import app
from controller.shell import supervisor
from controller.shell.engine_options import EngineOptions, option_name
from engine.config import EngineConfig, LoRAConfig
from engine.worker import options as engine_options

SAID_OTHERWISE = {"adapter_roots", "device_bytes_max", "max_loras"}
"""What the supervisor tells every engine from other options of `serve`."""

OTHER_VALUES: dict[str, Any] = {
    "max_lora_rank": 64,
    "lora_dtype": "bfloat16",
    "target_modules": ("q_proj", "model.layers.0.mlp.up_proj"),
    "fully_sharded_loras": True,
    "default_mm_loras": ("image=a=b",),
    "enable_tower_connector_lora": True,
    "specialize_active_lora": True,
    "dual_stream": True,
    "batch_invariant": True,
    "enable_mixed_moe_lora_format": True,
    "allow_pickled_weights": True,
    "device": "cpu",
    "pin_memory": False,
    "file_threads": 3,
    "max_num_seqs": 4,
    "queue_requests_max": 5,
    "context_tokens_max": 6,
    "task": "classify",
    "pooling": "cls",
    "normalize": False,
    "expert_parallel": True,
    "capture_steps": True,
}
OPTIONS = msgspec.structs.fields(EngineOptions)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command sends the process's logs to its own stderr, which ends with it."""
    yield
    structlog.reset_defaults()


def parsed(words: list[str]) -> tuple[EngineConfig, LoRAConfig]:
    options = engine_options.parse(["--connect", "ipc://x", "--model", "m", *words])
    return engine_options.configs(options)


def told(config: EngineConfig, lora: LoRAConfig, name: str) -> Any:
    """A field as a command line would tell it."""
    value = getattr(lora if name in LoRAConfig.__dataclass_fields__ else config, name)
    if name == "default_mm_loras":
        return tuple(f"{modality}={path}" for modality, path in (value or {}).items())
    return value or () if name == "target_modules" else value


def test_both_know_the_same_options() -> None:
    own = [
        name for owner in (EngineConfig, LoRAConfig) for name in engine_options.option_names(owner)
    ]
    assert set(own) - SAID_OTHERWISE == {field.name for field in OPTIONS} == HELP.keys()
    assert len(own) == len(set(own))


@pytest.mark.parametrize("name", [field.name for field in OPTIONS])
def test_an_option_says_to_the_engine_what_was_said_to_serve(name: str) -> None:
    default = EngineOptions()
    assert default.command_line() == []
    assert told(*parsed([]), name) == getattr(default, name)
    other = EngineOptions(**{name: OTHER_VALUES[name]})
    assert getattr(other, name) != getattr(default, name)
    assert told(*parsed(other.command_line()), name) == getattr(other, name)


def test_every_engine_option_is_one_of_serve_with_a_word_about_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[EngineOptions] = []
    monkeypatch.setattr(supervisor, "serve", lambda c: started.append(c.engine_options) or 0)
    words = EngineOptions(**OTHER_VALUES).command_line()
    assert len(words) == len(OTHER_VALUES) + 1
    base = ["--dir", str(tmp_path), "serve", "--model", "m"]
    for given in ([], words, ["--pin-memory"]):
        result = CliRunner().invoke(app, [*base, *given])
        assert result.exit_code == 0, result.output
    assert started == [
        EngineOptions(),
        EngineOptions(**OTHER_VALUES),
        EngineOptions(pin_memory=True),
    ]
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name in OTHER_VALUES:
        assert f"--{option_name(name)}" in shown
        assert HELP[name].split(";")[0][:40] in shown
    assert CliRunner().invoke(app, [*base, "--", "--max-lora-rank", "8"]).exit_code == 2


def test_an_engine_tells_what_is_wrong_with_a_modality() -> None:
    for text in ("image", "=a", "image=", ""):
        with pytest.raises(ValueError, match="MODALITY=PATH"):
            parsed([f"--default-mm-lora={text}"])


def test_every_field_is_an_option_or_said_not_to_be() -> None:
    for owner, not_options in engine_options.NO_OPTIONS.items():
        names = {field.name for field in fields(owner)}
        assert set(not_options) <= names
        assert {*not_options, *engine_options.option_names(owner)} == names
        for field in fields(owner):
            if field.name != "model_directory":
                assert (field.default, field.default_factory) != (MISSING, MISSING)
