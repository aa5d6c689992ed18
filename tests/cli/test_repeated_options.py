"""Options that take several values in one go, as vLLM's do."""

import msgspec
import pytest
from typer.testing import CliRunner

from loradock.cli import gateway
from loradock.cli.main import app
from loradock.gateway.options import GatewayConfig


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
def test_values_follow_one_flag_or_several(monkeypatch, tmp_path, words, modules, names):
    started = []
    monkeypatch.setattr(gateway.os, "execv", lambda _, arguments: started.append(arguments))
    arguments = ["--dir", str(tmp_path), "gateway", *words]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    config = msgspec.json.decode(started[0][-1], type=GatewayConfig)
    assert (config.lora_modules, config.served_model_names) == (modules, names)


def test_a_word_after_an_option_of_one_value_is_an_error(tmp_path):
    arguments = ["--dir", str(tmp_path), "gateway", "--model", "m", "stray"]
    assert CliRunner().invoke(app, arguments).exit_code == 2
