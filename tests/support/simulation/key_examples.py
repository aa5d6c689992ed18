"""Keys for tests: made and allowed on first use, next to the controller's directory."""

from pathlib import Path
from typing import Any

from loradock.controller.server.keys import AllowedKey, KeyStore, Right, new_pair
from loradock.processes.key_files import (
    KeyPair,
    public_key_path,
    read_key_pair,
    read_public_key,
    write_key_pair,
    write_new,
)


def key_file(directory: Path, name: str) -> Path:
    """Return the file of a key pair, which no controller allows yet."""
    path = directory.with_name(f"{directory.name}.{name}.key")
    if not path.exists():
        pair = new_pair()
        write_key_pair(path, pair)
        write_new(public_key_path(path), pair.public.encode(), 0o644)
    return path


def allow(directory: Path, name: str, right: Right, *adapters: str) -> Path:
    """Return the file of a key pair that the controller of `directory` allows."""
    path, store = key_file(directory, name), KeyStore(directory)
    public = read_public_key(public_key_path(path))
    if public not in {key.public for key in store.read()}:
        store.server_pair()
        store.allow(AllowedKey(name, public, right, adapters))
    return path


def server_key(directory: Path) -> str:
    """Return the public key of a directory's controller."""
    return KeyStore(directory).server_pair().public


def use_keys(socket: Any, pair: KeyPair, server: str) -> None:
    """Encrypt a socket's connections."""
    socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
    socket.curve_serverkey = server.encode()


def use_engine_keys(socket: Any, directory: Path) -> None:
    """Let a socket connect as an engine that the controller allows."""
    pair = read_key_pair(allow(directory, "engine", "engine"))
    use_keys(socket, pair, server_key(directory))


def engine_arguments(directory: Path) -> list[str]:
    """Return the options with which an engine that was started elsewhere is admitted."""
    path = allow(directory, "engine", "engine")
    return [f"--key={path}", f"--server-key={KeyStore(directory).server_public_path}"]
