"""Commands that become another process: the gateway, and an engine for a server elsewhere."""

import os
from typing import Any

import msgspec
import pytest

from loradock.engine.worker.process import configs
from loradock.gateway.options import GatewayConfig
from loradock.messages.engine_options import EngineProcess
from loradock.processes.subprocesses import ENTRY_FILE
from tests.support.simulation.command_runs import run


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of the programs that replaced the command's process."""
    programs: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: programs.append(arguments))
    return programs


def test_a_gateway_gets_its_options_as_json(replaced: list[list[str]], tmp_path) -> None:
    words = ["--http", "[::1]:0", "--model", "m", "--adapter-root", "a", "--max-model-len", "9"]
    result = run("gateway", *words, "--drain-timeout", "3", directory=tmp_path)
    assert result.exit_code == 0, result.output
    [[_, *module, config]] = replaced
    assert module == ["-P", str(ENTRY_FILE), "gateway"]
    assert msgspec.json.decode(config, type=GatewayConfig) == GatewayConfig(
        directory=str(tmp_path),
        host="::1",
        port=0,
        model="m",
        adapter_roots=("a",),
        max_model_len=9,
        drain_timeout_s=3,
    )


@pytest.mark.parametrize(
    ("words", "modules", "names"),
    [
        (("--lora-modules", "a=x", "b=y"), ("a=x", "b=y"), ()),
        (("--lora-modules", "a=x", "--lora-modules", "b=y"), ("a=x", "b=y"), ()),
        (("--lora-modules=a=x", "b=y"), ("a=x", "b=y"), ()),
        (
            ("--lora-modules", '{"name": "a"}', "--model", "m", "--served-model-name", "p", "q"),
            ('{"name": "a"}',),
            ("p", "q"),
        ),
    ],
)
def test_values_follow_one_flag_or_several(
    replaced: list[list[str]], tmp_path, words: Any, modules: Any, names: Any
) -> None:
    """As vLLM's options do."""
    result = run("gateway", *words, directory=tmp_path)
    assert result.exit_code == 0, result.output
    config = msgspec.json.decode(replaced[0][-1], type=GatewayConfig)
    assert (config.lora_modules, config.served_model_names) == (modules, names)


def test_a_word_after_an_option_of_one_value_is_an_error(tmp_path) -> None:
    assert run("gateway", "--model", "m", "stray", directory=tmp_path).exit_code == 2


def test_a_wrong_address_is_refused(replaced: list[list[str]], tmp_path) -> None:
    for command in (("gateway",), ("serve", "--model", "m")):
        result = run(*command, "--http", "nowhere", directory=tmp_path)
        assert result.exit_code == 2
        assert "HOST:PORT" in result.stderr
    assert replaced == []


def test_help_does_not_show_keys(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("LORADOCK_API_KEY", "very-secret")
    result = run("gateway", "--help", directory=tmp_path)
    assert result.exit_code == 0
    assert "very-secret" not in result.output


def test_an_engine_is_run_with_its_options(replaced: list[list[str]], tmp_path) -> None:
    words = ["--connect", "tcp://host:1", "--model", "m", "--key", "k", "--server-key", "s"]
    words += ["--max-loras", "3", "--max-lora-rank", "8", "--max-num-seqs", "5"]
    for more in ([], ["--tensor-parallel-size", "2"]):
        assert run("engine", "run", *words, *more, directory=tmp_path).exit_code == 0
    config, lora = configs(msgspec.json.decode(replaced[0][-1], type=EngineProcess))
    assert (config.max_num_seqs, lora.max_loras, lora.max_lora_rank) == (5, 3, 8)
    assert "ranks" not in replaced[0]
    assert "ranks" in replaced[1]


@pytest.mark.parametrize("left_out", ["--connect", "--model", "--key", "--server-key"])
def test_an_engine_needs_a_controller_a_model_and_keys(left_out: str, tmp_path) -> None:
    words = ["--connect=tcp://host:1", "--model=m", "--key=k", "--server-key=s"]
    words = [word for word in words if not word.startswith(f"{left_out}=")]
    result = run("engine", "run", *words, directory=tmp_path)
    assert result.exit_code == 2
    assert f"Missing option '{left_out}'" in result.stderr
