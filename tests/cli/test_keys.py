"""The commands on keys, and a remote server used by the command line."""

import json
from pathlib import Path

import pytest

from loradock.cli.exit_codes import ExitCode
from loradock.client import Client, EngineGone, NotAllowed, sockets
from loradock.controller.server.keys import AllowedKey, KeyStore
from loradock.processes.key_files import public_key_path, read_key_pair
from tests.support.parallel.processes import controller
from tests.support.simulation.command_runs import run, run_json
from tests.support.simulation.key_examples import allow, key_file
from tests.support.simulation.remote_examples import free_address
from tests.support.waiting import wait_until


def test_a_key_is_made_allowed_listed_and_revoked(tmp_path: Path) -> None:
    directory, file = tmp_path / "d", tmp_path / "me.key"
    (made,) = run_json("keys", "new", str(file), directory=directory)
    assert made == {"public": read_key_pair(file).public, "file": str(file)}
    allowed = ("keys", "allow", "me", f"{file}.pub", "--right", "operate", "--adapter", "acme-*")
    (shown,) = run_json(*allowed, directory=directory)
    assert Path(shown["server_key"]).read_text().strip() == KeyStore(directory).server_pair().public
    key = AllowedKey("me", made["public"], "operate", ("acme-*",))
    assert KeyStore(directory).read() == (key,)
    (listed,) = run_json("keys", "list", directory=directory)
    assert listed == shown
    table = run("keys", "list", directory=directory).output
    assert all(text in table for text in ("me", "operate", "acme-*", made["public"]))
    (left,) = run_json("keys", "revoke", "me", directory=directory)
    assert left["keys"] == []
    secret = read_key_pair(file).secret
    assert secret not in json.dumps([made, shown, listed])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("allow", "me", "not a key"), "not a key"),
        (("allow", "a b", "x" * 40), "1 to 16 of the characters"),
        (("allow", "me", "x" * 40, "--adapter", "a/b"), "wildcards"),
        (("allow", "me", "x" * 40, "--right", "engine", "--adapter", "a"), "engine"),
        (("revoke", "me"), "no key is allowed"),
    ],
)
def test_what_can_not_be_done_is_refused(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    result = run("keys", *words, directory=tmp_path)
    assert result.exit_code == ExitCode.REFUSED
    assert text in result.stderr
    assert KeyStore(tmp_path).read() == ()


def test_no_key_file_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "me.key"
    file.write_text("precious")
    result = run("keys", "new", str(file), directory=tmp_path)
    assert result.exit_code == ExitCode.REFUSED
    assert file.read_text() == "precious"


def test_commands_reach_a_remote_server_with_a_key(tmp_path: Path) -> None:
    directory, address = tmp_path / "d", free_address()
    key = allow(directory, "me", "read")
    with controller(directory, listen=address):
        wait_until((directory / "run" / "engine.sock").exists)
        server = KeyStore(directory).server_public_path
        keys = ("--address", address, "--key", str(key), "--server-key", str(server))
        result = run(*keys, "status", "--json", directory="/nowhere")
        # No engine is attached.
        assert result.exit_code == ExitCode.UNREACHABLE, result.output
        assert json.loads(result.stdout)["type"] == "StatusShown"
        refused = run(*keys, "load", "x", directory="/nowhere")
        assert refused.exit_code == ExitCode.REFUSED
        assert "L013" in refused.stderr
    missing = run("--address", address, "status", directory="/nowhere")
    assert missing.exit_code == ExitCode.USAGE
    assert "loradock keys new" in missing.stderr


def test_what_keeps_a_key_from_a_server_is_told_with_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "FIRST_START_S", 0.01)
    directory, address = tmp_path / "d", free_address()
    key, unknown = allow(directory, "me", "read"), key_file(directory, "other")
    server = KeyStore(directory).server_public_path

    def said(key: Path, server: Path, *command: str) -> str:
        place = ("--address", address, "--key", str(key), "--server-key", str(server))
        result = run(*place, *(command or ("status",)), directory="/nowhere")
        assert address in result.stderr
        return f"{result.exit_code:d} {result.stderr}"

    assert said(key, server).startswith(f"6 L011 nothing listens at {address}")
    waited = said(key, server, "ready", "--timeout", "0.2")
    assert waited.startswith(f"6 not ready after 0.2 s: nothing listens at {address}")
    with pytest.raises(EngineGone, match=f"nothing listens at {address}"):
        Client(address=address, key=key, server_key=server)
    nowhere = "tcp://no-such-host.invalid:7000"
    with pytest.raises(EngineGone, match="its name can't be resolved"):
        Client(address=nowhere, key=key, server_key=server)
    with controller(directory, listen=address):
        wait_until((directory / "run" / "engine.sock").exists)
        assert f"the server at {address} does not know this key" in said(unknown, server)
        other = said(key, public_key_path(unknown))
        assert f"{address} is another server: its key is not the one of --server-key" in other
        result = run("keys", "revoke", "me", directory=directory)
        assert result.exit_code == 0, result.output
        assert f"the server at {address} has revoked this key" in said(key, server)
        with pytest.raises(NotAllowed, match=f"{address} has revoked this key"):
            Client(address=address, key=key, server_key=server)


@pytest.mark.parametrize("address", ["tcp://h", "tcp://*:1x", "ipc://x", "tcp://h:65534"])
def test_serve_refuses_what_is_no_address(tmp_path: Path, address: str) -> None:
    words = ("serve", "--engine", "external", "--listen", address)
    result = run(*words, directory=tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert "tcp://HOST:PORT" in result.stderr
