"""The options of the gateway, on both commands that start one."""

import os
from typing import Literal, get_args, get_origin

import msgspec
import pytest

from loradock.cli.gateway import GATEWAY_OPTIONS
from loradock.gateway.options import GatewayConfig, GatewayOptions
from loradock.processes.subprocesses import ENTRY_FILE
from tests.support.simulation.command_runs import run

VALUES = {int: "7", str: "x", bool: None}


@pytest.fixture
def replaced(monkeypatch):
    """The arguments of the programs that took the command's place."""
    programs = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: programs.append(arguments))
    return programs


def options_of_all():
    for parameter in GATEWAY_OPTIONS.parameters:
        [option] = parameter.annotation.__metadata__
        # In an annotation, the first argument of an option is its name.
        yield parameter.name, option.default, parameter.annotation.__origin__


def test_every_field_is_an_option(replaced, tmp_path):
    arguments = ["--http", "[::1]:0", "--model", "m"]
    expected = {}
    for name, flag, kind in options_of_all():
        if kind is bool:
            arguments.append(flag)
            expected[name] = True
        elif kind in (int, str):
            arguments += [flag, VALUES[kind]]
            expected[name] = kind(VALUES[kind])
        elif get_origin(kind) is Literal:
            arguments += [flag, get_args(kind)[-1]]
            expected[name] = get_args(kind)[-1]
        else:
            arguments += [flag, "a", flag, "b"]
            expected[name] = ("a", "b")
    result = run("gateway", *arguments, directory=tmp_path)
    assert result.exit_code == 0, result.output
    [[_, *module, config]] = replaced
    assert module == ["-P", str(ENTRY_FILE), "gateway"]
    expected_config = GatewayConfig(
        directory=str(tmp_path), host="::1", port=0, model="m", **expected
    )
    assert msgspec.json.decode(config, type=GatewayConfig) == expected_config
    for name in GatewayOptions.__struct_fields__:
        assert getattr(expected_config, name) != getattr(GatewayOptions(), name), name


def test_a_wrong_address_is_refused(replaced, tmp_path):
    for command in (("gateway",), ("serve", "--model", "m")):
        result = run(*command, "--http", "nowhere", directory=tmp_path)
        assert result.exit_code == 2
        assert "HOST:PORT" in result.stderr
    assert replaced == []


def test_help_does_not_show_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("LORADOCK_API_KEY", "very-secret")
    result = run("gateway", "--help", directory=tmp_path)
    assert result.exit_code == 0
    assert "very-secret" not in result.output


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--lora-modules", "sql=sql"), "--lora-modules"),
        (("--allow-runtime-lora-updating",), "--allow-runtime-lora-updating"),
        (("--api-key-file", "keys"), "--api-key-file"),
    ],
)
def test_options_of_a_gateway_are_not_ignored_where_none_is_started(tmp_path, words, flag):
    result = run("serve", "--model", "m", *words, directory=tmp_path)
    assert result.exit_code == 2
    assert f"{flag} is an option of the HTTP gateway" in result.stderr
    assert "add --http 127.0.0.1:8000" in result.stderr
