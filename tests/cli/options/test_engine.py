"""The engine's options are one Struct: for `serve`, for the supervisor and for the engine."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from loradock.cli import serve
from loradock.cli.main import app
from loradock.controller.server import supervisor
from loradock.controller.server.config import ServeConfig, ServerConfig, Supervision
from loradock.controller.server.supervisor import Ended
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.worker.options import configs, parse
from loradock.messages.engine_options import EngineArguments, EngineOptions
from loradock.processes.option_list import command_line, options_of
from loradock.processes.subprocesses import process_command
from tests.support.plain_logs import reset_logs

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
    "dtype": "float16",
    "pin_memory": False,
    "file_threads": 3,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "queue_requests_max": 5,
    "kv_cache_bytes": 7,
    "paged_attention": False,
    "prefix_caching": False,
    "context_tokens_max": 6,
    "task": "classify",
    "pooling": "cls",
    "normalize": False,
    "expert_parallel": True,
    "capture_steps": True,
    "quantization": "torchao-int8",
    "adapter_weights": ("tenant=3",),
}
FROM_OTHER_OPTIONS = {
    "adapter_roots": ("a", "-b"),
    "max_loras": 3,
    "device_bytes_max": 9,
    "parent_pid": 11,
    "progress": "p",
    "step_timeout_ms": 12,
    "key": "/k",
    "server_key": "/s",
    "log_format": "json",
    "log_level": "debug",
    "engine_id": "e",
    "launch_id": "l",
}
"""The supervisor specifies these from other options of `serve`, the engine's id aside."""

KEYS = ("--key", "k", "--server-key", "s")

NOT_OPTIONS = {"adapter_bounds", "max_cpu_loras"}
"""Fields of the configurations that only a program can set."""

PROCESS_ONLY = {
    *("connect", "model", "key", "server_key", "log_format", "log_level"),
    *("parent_pid", "progress", "step_timeout_ms", "engine_id", "launch_id"),
}
"""Arguments of the process that are no field of a configuration of the same name."""


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command sends the process's logs to its own stderr, which ends with it."""
    yield
    reset_logs()


def parsed(*words: str) -> EngineArguments:
    return parse(["--connect", "ipc://x", "--model", "m", *KEYS, *words])


def configured(arguments: EngineArguments, name: str) -> Any:
    """The field of a configuration, in the form that a command line has."""
    config, lora = configs(arguments)
    value = getattr(lora if name in LoRAConfig.__dataclass_fields__ else config, name)
    if name == "default_mm_loras":
        return tuple(f"{modality}={path}" for modality, path in (value or {}).items())
    if name == "adapter_weights":
        return tuple(f"{adapter}={weight}" for adapter, weight in (value or {}).items())
    if name == "adapter_roots":
        return tuple(map(str, value))
    return value or () if name == "target_modules" else value


def config_fields() -> dict[str, "Field[Any]"]:
    return {field.name: field for owner in (EngineConfig, LoRAConfig) for field in fields(owner)}


def test_the_struct_has_the_fields_of_the_configurations() -> None:
    known = config_fields()
    assert len(known) == len(fields(EngineConfig)) + len(fields(LoRAConfig))
    options = {option.field for option in options_of(EngineArguments)}
    assert options - PROCESS_ONLY == known.keys() - NOT_OPTIONS - {"model_directory"}


def test_the_struct_has_the_defaults_of_the_configurations() -> None:
    for option in options_of(EngineArguments):
        if option.field not in PROCESS_ONLY:
            field = config_fields()[option.field]
            # The default of `dual_stream` depends on the environment, and is off without it.
            default = field.default_factory() if field.default is MISSING else field.default
            # On a command line the absence of values is an empty tuple.
            expected = () if default is None and option.is_repeated else default
            assert option.default == expected, option.field


def test_the_defaults_of_an_engine_without_options_are_those_of_its_configurations() -> None:
    assert configs(parsed()) == (EngineConfig(Path("m")), LoRAConfig())


@pytest.mark.parametrize("name", [*OTHER_VALUES, "adapter_roots", "max_loras", "device_bytes_max"])
def test_an_argument_reaches_its_configuration(name: str) -> None:
    default = EngineArguments(connect="ipc://x", model="m", key="k", server_key="s")
    assert configured(default, name) == getattr(default, name)
    values = OTHER_VALUES | FROM_OTHER_OPTIONS
    other = msgspec.structs.replace(default, **{name: values[name]})
    assert getattr(other, name) != getattr(default, name)
    assert configured(other, name) == getattr(other, name)


def test_an_engine_reads_the_command_line_that_its_supervisor_writes() -> None:
    assert command_line(EngineOptions()) == []
    for values in ({}, OTHER_VALUES, FROM_OTHER_OPTIONS):
        written = EngineArguments(
            connect="ipc://x",
            model="-m",
            **{"key": "k", "server_key": "s", "engine_id": "i"} | values,
        )
        assert parse(command_line(written)) == written
        assert {*OTHER_VALUES, *FROM_OTHER_OPTIONS, "connect", "model"} == {
            *written.__struct_fields__
        }


def test_the_supervisor_specifies_every_argument(tmp_path: Path) -> None:
    server = ServerConfig(str(tmp_path))
    config = ServeConfig(server, "m", ("a", "b"), engine_options=EngineOptions(**OTHER_VALUES))
    config = msgspec.structs.replace(config, step_timeout_ms=7, log_format="json")
    supervision = Supervision(engine_progress="page", launch_id="launch")
    command = supervisor._engine_command(config, supervision, "pair")
    start = process_command("engine")
    assert command[: len(start)] == start
    words = command[len(start) :]
    found = parse(words)
    assert (found.model, found.adapter_roots) == ("m", ("a", "b"))
    assert found.max_loras == server.limits.slots_max
    assert found.device_bytes_max == server.limits.device_bytes_max
    assert found.parent_pid
    assert (found.progress, found.step_timeout_ms) == ("page", 7)
    assert (found.key, found.log_format) == ("pair", "json")
    # By its id, a controller recognizes the engines of its own supervisor.
    assert found.engine_id.startswith("launch")
    assert parse(words).engine_id != found.engine_id
    assert found.server_key == f"{tmp_path}/keys/server.key.pub"
    assert found.connect == f"ipc://{tmp_path}/run/engine.sock"
    assert {name: getattr(found, name) for name in OTHER_VALUES} == OTHER_VALUES


def test_every_start_of_an_engine_has_an_id_of_its_own() -> None:
    assert parsed().engine_id != parsed().engine_id != ""
    assert parsed("--engine-id", "e").engine_id == "e"


def test_every_engine_option_is_one_of_serve_with_its_help_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[EngineOptions] = []
    monkeypatch.setattr(supervisor, "serve", lambda c: started.append(c.engine_options) or Ended(0))
    monkeypatch.setattr(serve, "_check_start", lambda *_: None)
    words = command_line(EngineOptions(**OTHER_VALUES))
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
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"}).output
    shown = " ".join(shown.split())
    for option in options_of(EngineOptions):
        assert option.flag in shown
        assert option.help[:40] in shown
    assert CliRunner().invoke(app, [*base, "--", "--max-lora-rank", "8"]).exit_code == 2


@pytest.mark.parametrize("name", ["max_lora_rank", "file_threads", "max_num_seqs"])
def test_serve_refuses_numbers_that_the_configurations_refuse(name: str, tmp_path: Path) -> None:
    words = command_line(EngineOptions(**{name: 0}))
    with pytest.raises(ValueError, match=name):
        configs(parsed(*words))
    result = CliRunner().invoke(app, ["--dir", str(tmp_path), "serve", "--model", "m", *words])
    assert result.exit_code == 2
    assert words[0].partition("=")[0] in result.output


@pytest.mark.parametrize("text", ["a", "=2", "a=", "a=b", "a=-1", "a=0", "a=1001", "a=1.5", ""])
def test_an_engine_refuses_a_malformed_weight(text: str) -> None:
    with pytest.raises(ValueError, match=r"ADAPTER=NUMBER|an integer from 1 to 1000"):
        configs(parsed(f"--adapter-weight={text}"))


@pytest.mark.parametrize("text", ["image", "=a", "image=", ""])
def test_an_engine_refuses_a_malformed_default_adapter(text: str) -> None:
    with pytest.raises(ValueError, match="MODALITY=PATH"):
        configs(parsed(f"--default-mm-lora={text}"))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--connect", "ipc://x"],
        ["--connect", "tcp://x", "--model", "m"],
        ["--connect", "ipc://x", "--model", "m", "--max-loras", "many"],
    ],
)
def test_a_command_line_that_can_not_be_read_ends_the_process(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
