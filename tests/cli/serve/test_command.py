"""The options of `serve`: each reaches its process from the command line, a file or a variable."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.cli.exit_codes import ExitCode
from loradock.cli.serve import command, supervisor
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.controller.core.limits import TURN_TOKENS_DEFAULT, Limits, limits_to
from loradock.controller.server.config import ServerConfig, ServerOptions, Supervision
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.worker.process import configs
from loradock.gateway.address import open_listener
from loradock.gateway.options import GatewayConfig, GatewayOptions
from loradock.messages.engine_options import EngineOptions, EngineProcess, LoRAOptions
from loradock.messages.options import Option, options_of
from loradock.processes.subprocesses import engine_command
from tests.support.parallel.processes import TINY
from tests.support.plain_logs import reset_logs
from tests.support.simulation.command_runs import run

OWNERS = (ServeOptions, Limits, ServerOptions, LoRAOptions, EngineOptions, GatewayOptions)
# A dock of a fleet excludes other options: it has a test of its own.
OPTIONS = [
    (owner, option) for owner in OWNERS for option in options_of(owner) if option.field != "join"
]

SAMPLES = {
    "model": "m",
    "listen": "tcp://127.0.0.1:4711",
    "http": "0.0.0.0:80",
    "policy": "none",
    "log_retention": "keep",
    "adapters": "n=p=q",
    "default_mm_loras": "image=x=y",
    "adapter_weights": "tenant=3",
    # An adapter in a slot is on the host too.
    "max_loras": "3",
    "max_cpu_loras": "5",
}


def sample(option: Option) -> str:
    """Return a text for an option that is not its default; empty for a switch."""
    if option.flag[2:].replace("-", "_") in SAMPLES:
        return SAMPLES[option.flag[2:].replace("-", "_")]
    if option.field in SAMPLES:
        return SAMPLES[option.field]
    if choices := option.choices or dict(option.names):
        return str(next(one for one in reversed(choices) if one != option.default))
    if option.kind is bool:
        return ""
    if option.kind is str:
        return "x"
    return "1.5" if option.is_scaled else "7KiB" if option.unit == "bytes" else "9"


def words_of(option: Option) -> list[str]:
    if option.kind is bool:
        return [option.flag.replace("--", "--no-") if option.default is True else option.flag]
    return [option.flag, sample(option)]


def expected(option: Option) -> Any:
    if option.kind is bool:
        return option.default is not True
    return (
        option.parse([sample(option)]) if option.is_repeated else option.parse_text(sample(option))
    )


def found(config: ServeConfig, owner: type, option: Option) -> Any:
    parts = {
        ServeOptions: config.options,
        Limits: config.server.limits,
        ServerOptions: config.server,
        LoRAOptions: config.lora,
        EngineOptions: config.engine,
        GatewayOptions: config.gateway or GatewayConfig(),
    }
    return getattr(parts[owner], option.field)


class Started(list[ServeConfig]):
    """The configurations with which `serve` was called; it returns `status`."""

    status = 0

    def serve(self, config: ServeConfig) -> supervisor.Ended:
        self.append(config)
        return supervisor.Ended(self.status, "a reason" if self.status else "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    calls = Started()
    monkeypatch.setattr(supervisor, "serve", calls.serve)
    monkeypatch.setattr(command, "_check_start", lambda *_: None)
    yield calls
    reset_logs()


def test_serve_starts_with_the_defaults_of_its_processes(started: Started, tmp_path: Path) -> None:
    result = run("serve", "--model", "m", directory=tmp_path)
    assert result.exit_code == 0, result.output
    # Logs that were written before there were turns have none.
    limits = Limits(turn_tokens=TURN_TOKENS_DEFAULT)
    server = ServerConfig(str(tmp_path), limits)
    assert started == [ServeConfig(server, ServeOptions(model="m"))]


def test_every_option_reaches_its_process_in_three_ways(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for _, option in OPTIONS for word in words_of(option)]
    result = run("serve", *words, directory=tmp_path)
    assert result.exit_code == 0, result.output
    for owner, option in OPTIONS:
        value = found(started[0], owner, option)
        assert value == expected(option), option.flag
        assert value != option.default, option.flag
    values: dict[str, Any] = {
        option.flag[2:]: sample(option) or option.default is not True for _, option in OPTIONS
    }
    file = tmp_path / "serve.toml"
    file.write_text("".join(f"{name} = {json.dumps(one)}\n" for name, one in values.items()))
    result = run("serve", "--config", str(file), directory=tmp_path)
    assert result.exit_code == 0, result.output
    assert started[1] == started[0]
    # The command line precedes the environment, and that the file.
    monkeypatch.setenv("LORADOCK_MAX_LORAS", "4")
    assert run("serve", "--config", str(file), directory=tmp_path).exit_code == 0
    words = ["--config", str(file), "--max-loras", "5"]
    assert run("serve", *words, directory=tmp_path).exit_code == 0
    assert [config.server.limits.max_loras for config in started[2:]] == [4, 5]
    for _, option in OPTIONS:
        if option.variable:
            monkeypatch.setenv(option.variable, sample(option) or str(option.default is not True))
    result = run("serve", "--api-key", "x", directory=tmp_path)
    assert result.exit_code == 0, result.output
    assert started[-1] == started[0]


def test_a_dock_gets_the_file_and_the_key_of_its_fleet(started: Started, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('members = ["http://m1:2379"]\nkey = "0123456789abcdef"\n')
    file.chmod(0o600)
    words = ["--model", "m", "--http", "127.0.0.1:8001", "--join", str(file)]
    result = run("serve", *words, directory=tmp_path)
    assert result.exit_code == 0, result.output
    gateway = started[0].gateway
    assert gateway is not None
    assert (gateway.fleet, gateway.fleet_key) == (str(file), "0123456789abcdef")


def test_the_engine_gets_what_serve_was_started_with(started: Started, tmp_path: Path) -> None:
    words = [word for _, option in OPTIONS for word in words_of(option)]
    words += ["--dtype", "float32", "--no-pin-memory", "--engine", "managed"]
    words += ["--no-dual-stream", "--tensor-parallel-size", "1"]
    assert run("serve", *words, directory=tmp_path).exit_code == 0
    config = started[0]
    supervision = Supervision(engine_progress="page", launch_id="launch")
    process = supervisor.engine_process(config, supervision, "pair")
    argument = engine_command(process)[-1]
    assert msgspec.json.decode(argument, type=EngineProcess) == process
    assert (process.progress, process.launch_id, process.start.key) == ("page", "launch", "pair")
    assert process.step_timeout_ms == config.options.step_timeout_ms
    assert process.start.connect == f"ipc://{tmp_path}/run/engine.sock"
    assert process.start.server_key == f"{tmp_path}/keys/server.key.pub"
    engine, lora = configs(process)
    assert (engine.adapter_roots, engine.model_directory) == ((Path("x"),), Path("m"))
    assert engine.device_bytes_max == config.server.limits.device_bytes_max
    assert lora.max_loras == config.server.limits.max_loras
    for option in options_of(EngineOptions):
        assert getattr(engine, option.field) == getattr(config.engine, option.field)
    for option in options_of(LoRAOptions):
        assert getattr(lora, option.field) == getattr(config.lora, option.field)


def test_an_engine_of_several_processes_is_started_by_torchrun(tmp_path: Path) -> None:
    options = ServeOptions(model="m", tensor_parallel_size=2)
    config = ServeConfig(ServerConfig(str(tmp_path)), options)
    process = supervisor.engine_process(config, Supervision(), "pair")
    words = engine_command(process)
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert msgspec.json.decode(words[-1], type=EngineProcess) == process


def test_without_options_an_engine_has_the_defaults_of_its_configurations(tmp_path: Path) -> None:
    config = ServeConfig(ServerConfig(str(tmp_path)), ServeOptions(model="m"))
    process = supervisor.engine_process(config, Supervision(), "pair")
    engine, lora = configs(process)
    assert engine == EngineConfig(Path("m"))
    assert lora == LoRAConfig(max_loras=Limits().max_loras)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max-lora = 3", "'max-lora' is not an option did you mean 'max-loras'?"),
        ("slots = 3", "'slots' is not an option did you mean 'max-loras'?"),
        ("nothing-like-it = 3", "`loradock serve --help-all` lists them"),
        ('dir = "d"', "name the directory before the command"),
        ("[max-loras]", "'max-loras' must be a value, got a table"),
        ("max-loras = ", "it is not TOML"),
        ("max-loras = 0", "'--max-loras'"),
        ("task = 'sing'", "--task must be one of auto, generate, embed, classify, got sing"),
        ('host-bytes = "64M"', "use KiB, MiB"),
        ('default-mm-lora = ["image"]', "--default-mm-lora must be MODALITY=PATH, got 'image'"),
        ('default-mm-lora = "video=x"', "--default-mm-lora must be image=PATH"),
        ('adapter-weight = "a=1001"', "an integer from 1 to 1000"),
        ('adapter = ["a=b", "a=c"]', "--adapter a=c names an adapter twice"),
        ("max-cpu-loras = 2", "max-cpu-loras must be at least max-loras, which is 8, got 2"),
    ],
)
def test_a_wrong_file_is_explained(
    started: Started, tmp_path: Path, text: str, problem: str
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text + "\n")
    result = run("serve", "--model", "m", "--config", str(file), directory=tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert problem in " ".join(result.stderr.split())
    assert started == []
    missing = run("serve", "--config", str(tmp_path / "no.toml"), directory=tmp_path)
    assert "no.toml: No such file or directory" in missing.stderr


@pytest.mark.parametrize(
    ("old", "new"), [(option.former, option.flag) for _, option in OPTIONS if option.former]
)
def test_an_option_of_earlier_versions_is_answered_with_its_name_now(
    tmp_path: Path, old: str, new: str
) -> None:
    result = run("serve", old, "1", directory=tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert f"No such option: {old}" in result.stderr
    assert new in result.stderr


@pytest.mark.parametrize("words", [("--lora-modules", "sql=sql"), ("--api-key-file", "keys")])
def test_options_of_a_gateway_are_not_ignored_if_none_is_started(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    result = run("serve", "--model", "m", *words, directory=tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert f"{words[0]} is an option of the HTTP gateway" in result.stderr
    assert "add --http 127.0.0.1:8000" in result.stderr


def test_an_address_that_no_key_could_use_is_refused_at_the_start(tmp_path: Path) -> None:
    words = ("serve", "--check", "--model", str(TINY / "model"), "--listen", "tcp://127.0.0.1:7000")
    result = run(*words, directory=tmp_path)
    assert (result.exit_code, "no client is allowed" in result.stderr) == (ExitCode.USAGE, True)
    run("keys", "new", str(tmp_path / "me"))
    allowed = run("keys", "allow", "me", str(tmp_path / "me.pub"), directory=tmp_path)
    assert allowed.exit_code == 0, allowed.output
    assert run(*words, directory=tmp_path).exit_code == 0


def test_what_https_or_the_address_can_not_be_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("not PEM")
    pem = str(tmp_path / "no.pem")
    words = ("serve", "--check", "--model", str(TINY / "model"), "--http")
    for files, reason in (
        (("--ssl-keyfile", pem), "need --ssl-certfile"),
        (("--ssl-ca-certs", pem), "need --ssl-certfile"),
        (("--ssl-certfile", pem), "are no certificate and its key"),
    ):
        refused = run(*words, "0", *files, directory=tmp_path)
        assert refused.exit_code == ExitCode.USAGE
        assert reason in refused.stderr
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        refused = run(*words, str(port), directory=tmp_path)
        assert refused.exit_code == ExitCode.UNREACHABLE
        assert f"--http 127.0.0.1:{port} can't be used: Address already in use" in refused.stderr
    assert run(*words, str(port), directory=tmp_path).exit_code == 0


def test_serve_prints_its_configuration_as_json_and_exits_like_its_children(
    started: Started, tmp_path: Path
) -> None:
    result = run("serve", "--model", "m", "--json", directory=tmp_path)
    limits = Limits(turn_tokens=TURN_TOKENS_DEFAULT)
    assert json.loads(result.stdout)["server"]["limits"] == limits_to(limits)
    for status, exit_code in ((7, ExitCode.LOG), (2, ExitCode.USAGE), (99, ExitCode.FAILURE)):
        started.status = status
        result = run("serve", "--model", "m", "--json", directory=tmp_path)
        assert result.exit_code == exit_code
        assert json.loads(result.stderr.splitlines()[-1])["error"]["exit"] == exit_code
