"""`fleet.toml`: what is refused, and what `loradock fleet init` and `status` print."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loradock.cli.main import app
from loradock.fleet.config import ConfigError, read_config
from tests.support.fleet.etcd import Etcd
from tests.support.simulation.standin_controller import StandIn, view

GOOD = 'members = ["http://m1:2379"]\nkey = "0123456789abcdef"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("members = [", "fleet.toml"),
        ('key = "0123456789abcdef"\n', "members"),
        ('members = []\nkey = "0123456789abcdef"\n', "members"),
        ('members = ["http://m1:2379"]\nkey = "short"\n', "key"),
        (GOOD + "other = 1\n", "other"),
        (GOOD + 'name = "a/b"\n', "name"),
        (GOOD.replace("http://m1", "m1"), "must be a URL"),
        (GOOD.replace("http:", "https:"), "needs ca"),
    ],
)
def test_a_wrong_file_is_refused_with_its_reason(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=reason):
        read_config(file)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(GOOD)
    file.chmod(0o640)
    assert read_config(file).key not in repr(read_config(file))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_config(file)


def test_init_writes_a_fleet_once(tmp_path: Path) -> None:
    command = ["fleet", "init", "--members", "m1,m2:4000,m3", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    config = read_config(tmp_path / "fleet.toml")
    assert config.members == ("https://m1:2379", "https://m2:4000", "https://m3:2379")
    secret = {file.name for file in tmp_path.iterdir() if not file.stat().st_mode & 0o077}
    assert secret == {"fleet.toml", "client.key", "etcd.key"}
    unit = (tmp_path / "loradock-etcd-m2-4000.service").read_text()
    assert "--listen-client-urls=https://0.0.0.0:4000" in unit
    assert "m1-2379=https://m1:2380,m2-4000=https://m2:4001" in unit
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 4
    assert read_config(tmp_path / "fleet.toml") == config


def test_status_shows_what_the_catalogue_has(one_etcd: Etcd) -> None:
    command = ["fleet", "status", "--fleet", str(one_etcd.file), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"docks": [], "fronts": [], "adapters": []}


def test_a_fleet_without_etcd_is_unreachable(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(GOOD.replace("m1:2379", "127.0.0.1:1"))
    file.chmod(0o600)
    result = CliRunner().invoke(app, ["fleet", "status", "--fleet", str(file)])
    assert result.exit_code == 6


def test_a_dock_needs_an_address_and_leaves_https_to_the_front(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(GOOD)
    file.chmod(0o600)
    serve = ["--dir", str(tmp_path), "serve", "--model", "m", "--join", str(file)]
    refused = CliRunner().invoke(app, serve)
    assert refused.exit_code == 2
    assert "--http" in refused.output
    secure = ["--http", "127.0.0.1:0", "--ssl-certfile", "c"]
    refused = CliRunner().invoke(app, [*serve, *secure])
    assert refused.exit_code == 2
    assert "--ssl-certfile" in refused.output


def test_an_adapter_is_loaded_for_the_fleet_and_removed(one_etcd: Etcd, tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        command = ["--dir", str(tmp_path), *words, "--fleet", str(one_etcd.file), "--json"]
        return CliRunner().invoke(app, command)

    def wanted() -> Any:
        return json.loads(run("fleet", "status").output)["adapters"]

    with StandIn(tmp_path) as controller:
        assert run("load", "upper", "--copies", "2", "--path", "a/upper").exit_code == 0
        (found,) = wanted()
        assert found["name"] == "upper"
        assert (found["path"], found["copies"], found["rank"]) == ("a/upper", 2, 8)
        assert run("load", "upper", "--copies", "auto").exit_code == 0
        assert [(one["path"], one["copies"]) for one in wanted()] == [("upper", 0)]
        # Other content needs --replace, as on one server.
        controller.adapters["upper"] = view("upper", fingerprint="cd" * 16)
        assert run("load", "upper", "--copies", "1").exit_code == 4
        assert run("load", "upper", "--copies", "1", "--replace").exit_code == 0
        assert run("load", "upper", "--copies", "none").exit_code == 2
    assert run("fleet", "remove", "upper").exit_code == 0
    assert run("fleet", "remove", "upper").exit_code == 3
    assert wanted() == []
