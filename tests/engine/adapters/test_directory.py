"""Properties of opening adapters: only files below the roots are read, and no replaced ones."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.directory import CONFIG_NAME, WEIGHTS_NAME, OpenFile
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import AdapterBounds
from loradock.engine.errors import (
    AdapterConfigRefused,
    AdapterNotFound,
    AdapterUnsound,
    Conflict,
    EngineError,
    PathNotAllowed,
)
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    MODULES,
    Q,
    read,
    tensors,
    write,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with one valid adapter; a directory outside it holds another."""
    write(tmp_path / "root" / "team" / "valid")
    write(tmp_path / "outside" / "secret")
    return tmp_path / "root"


def read_at(path: str | Path, *roots: Path) -> LoadedAdapter:
    return read_adapter(str(path), roots, AdapterTarget(MODULES, LORA_CONFIG))


def test_a_path_is_relative_to_a_root_or_absolute_below_one(root: Path) -> None:
    other = root.parent / "empty"
    other.mkdir()
    for path in ("team/valid", "./team//valid/", root / "team" / "valid", f"/{root}/team/./valid"):
        assert read_at(path, other, root).model.loras
    assert read_at(root / "team" / "valid", root / "team" / "valid").model.loras


def test_the_root_itself_may_be_reached_through_links(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    for path in ("team/valid", link / "team" / "valid", root / "team" / "valid"):
        assert read_at(path, link).model.loras


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../outside/secret", "team/../team/valid", "/etc", "team/valid\0", "\ud800"],
)
def test_a_path_that_leaves_the_root_is_not_allowed(root: Path, path: str) -> None:
    with pytest.raises(PathNotAllowed if path != "." else EngineError):
        read_at(path, root)


def test_a_path_that_only_starts_like_a_root_is_outside(root: Path) -> None:
    outside = write(Path(f"{root}-evil") / "adapter")
    for path in (outside, root.parent / "outside" / "secret", f"{root}/../outside/secret"):
        with pytest.raises(PathNotAllowed):
            read_at(path, root)
    with pytest.raises(PathNotAllowed, match=r"started without an adapter root.*--adapter-root"):
        read_at("team/valid")


def hard_link(path: Path) -> None:
    path.hardlink_to(path.parents[2] / "outside" / "secret" / path.name)


def unix_socket(path: Path) -> None:
    descriptor = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    os.close(descriptor)


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (hard_link, "hard links"),
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
        (unix_socket, "not a regular file"),
    ],
)
def test_special_files_and_hard_links_are_refused(
    root: Path, make: Callable[[Path], None], text: str, name: str
) -> None:
    path = write(root / "bad") / name
    path.unlink()
    make(path)
    with pytest.raises(PathNotAllowed, match=text):
        read_at("bad", root)


def test_a_missing_file_or_directory_is_named(root: Path) -> None:
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        write(root / "half")
        (root / "half" / name).unlink()
        with pytest.raises(AdapterNotFound, match=name):
            read_at("half", root)
    for path in ("no", "team/no", f"team/valid/{CONFIG_NAME}", "x" * 3000):
        with pytest.raises(AdapterNotFound):
            read_at(path, root)
    with pytest.raises(AdapterNotFound, match="root"):
        read_at("valid", root / "no-root")


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_are_not_read_unless_allowed(root: Path, name: str) -> None:
    directory = write(root / "pickled")
    (directory / WEIGHTS_NAME).rename(directory / name)
    with pytest.raises(AdapterNotFound, match="pickled weights are not read"):
        read_at("pickled", root)


MALFORMED_CONFIGS = {
    "empty": b"",
    "half": json.dumps(dict(CONFIG)).encode()[:-1],
    "an array": b"[]",
    "a name twice": b'{"r": 4, "r": 8}',
    "a name twice deep": b'{"rank_pattern": {"q": 4, "q": 8}}',
    "NaN": b'{"lora_alpha": NaN}',
    "Infinity": b'{"lora_alpha": -Infinity}',
    "nested": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a huge number": b'{"r": ' + b"9" * 10_000 + b"}",
    "not UTF-8": b'{"r\xff": 1}',
    "UTF-16": json.dumps(dict(CONFIG)).encode("utf-16"),
    "two objects": b"{} {}",
    "yaml": b"r: 4\nlora_alpha: 8\n",
    "too many values": b'{"x": [' + b"1," * 70_000 + b"1]}",
    "too long": json.dumps(dict(CONFIG)).encode() + b" " * (1 << 20),
}


@pytest.mark.parametrize("name", MALFORMED_CONFIGS)
def test_a_malformed_config_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterConfigRefused, match=CONFIG_NAME):
        read(write(tmp_path / "bad", config=MALFORMED_CONFIGS[name]))


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused(root: Path, data: st.DataObject) -> None:
    whole = (root / "team" / "valid" / WEIGHTS_NAME).read_bytes()
    write(root / "cut", weights=whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(AdapterUnsound):
        read_at("cut", root)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(root: Path) -> None:
    write(root / "large")
    os.truncate(root / "large" / WEIGHTS_NAME, 9 << 30)
    with pytest.raises(AdapterUnsound, match="at most 8589934592"):
        read_at("large", root)
    with pytest.raises(AdapterUnsound, match="at most 100"):
        read(root / "team" / "valid", bounds=AdapterBounds(weights_bytes_max=100))


def test_nothing_is_allocated_for_tensors_that_do_not_fit(root: Path) -> None:
    write(root / "bad", weights=tensors(q_A=torch.ones(4, 17)))
    with (
        patch(
            "loradock.engine.adapters.weights.allocate_host",
            side_effect=AssertionError,
        ),
        pytest.raises(EngineError),
    ):
        read_at("bad", root)


def during_read(change: Callable[[], object]) -> Callable[[OpenFile, memoryview, int], None]:
    """Return an `OpenFile.read_into` that calls `change` before the first tensor is read."""
    read_into, pending = OpenFile.read_into, [change]

    def reads(self: OpenFile, buffer: memoryview, start: int) -> None:
        if self.name == WEIGHTS_NAME and start > 8 and pending:
            pending.pop()()
        read_into(self, buffer, start)

    return reads


def test_a_directory_that_is_replaced_is_read_as_it_was(root: Path) -> None:
    before = read_at("team/valid", root)
    other = {name: tensor + 1 for name, tensor in tensors().items()}
    write(root / "team" / "new", weights=other)

    def replace_directory() -> None:
        (root / "team" / "valid").rename(root / "team" / "old")
        (root / "team" / "new").rename(root / "team" / "valid")

    with patch.object(OpenFile, "read_into", during_read(replace_directory)):
        during = read_at("team/valid", root)
    after = read_at("team/valid", root)
    assert during.fingerprint == before.fingerprint != after.fingerprint
    assert torch.equal(during.model.loras[Q].lora_a, before.model.loras[Q].lora_a)


def test_a_directory_that_becomes_a_link_is_not_followed(root: Path) -> None:
    def replace_directory() -> None:
        (root / "team" / "valid").rename(root / "team" / "old")
        (root / "team" / "valid").symlink_to(root.parent / "outside" / "secret")

    with patch.object(OpenFile, "read_into", during_read(replace_directory)):
        assert read_at("team/valid", root).model.loras
    with pytest.raises(PathNotAllowed, match="link"):
        read_at("team/valid", root)


def overwrite(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(weights, (1, 1))


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda weights: os.truncate(weights, weights.stat().st_size - 8),
    "emptied": lambda weights: os.truncate(weights, 0),
    "longer": lambda weights: os.truncate(weights, weights.stat().st_size + 8),
    "overwritten": overwrite,
    "replaced": lambda weights: os.replace(write(weights.parent / "x") / WEIGHTS_NAME, weights),
    "config overwritten": lambda weights: overwrite(weights.parent / CONFIG_NAME),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changes_while_it_is_read_is_a_conflict(root: Path, name: str) -> None:
    weights = root / "team" / "valid" / WEIGHTS_NAME
    with (
        patch.object(OpenFile, "read_into", during_read(lambda: CHANGES[name](weights))),
        pytest.raises(Conflict, match="while it was read"),
    ):
        read_at("team/valid", root)
