"""The list of keys: what may be in it, its permissions, and changes by several processes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from loradock.controller.server.keys import (
    AllowedKey,
    DirectoryRefused,
    KeyListError,
    KeyStore,
    new_pair,
)
from loradock.processes.key_files import (
    KeyFileError,
    KeyPair,
    read_key_pair,
    read_public_key,
    share_key_pair,
    write_key_pair,
)
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[4]
PUBLIC = new_pair().public


def test_keys_are_in_files_of_their_user_alone(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "d")
    pair = store.server_pair()
    store.allow(AllowedKey("a", PUBLIC, "read"))
    assert store.server_pair() == pair
    assert read_public_key(store.server_public_path) == pair.public
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "d" / "keys").iterdir()
    }
    assert modes == {"server.key": 0o600, "server.key.pub": 0o644, "allowed.json": 0o600}
    assert stat.S_IMODE((tmp_path / "d" / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_a_secret_key_is_not_shown() -> None:
    pair = new_pair()
    assert pair.secret not in f"{pair} {pair!r}"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o601])
def test_a_key_that_others_can_access_is_not_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "k"
    write_key_pair(path, new_pair())
    assert read_key_pair(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_key_pair(path)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"public": "x", "secret": "y"}', b"\xff" * 9000]
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    for read in (read_key_pair, read_public_key):
        with pytest.raises(KeyFileError):
            read(path)  # type: ignore[operator]


def test_an_existing_key_is_not_overwritten(tmp_path: Path) -> None:
    write_key_pair(tmp_path / "k", new_pair())
    with pytest.raises(FileExistsError):
        write_key_pair(tmp_path / "k", new_pair())


def test_a_shared_key_pair_is_read_by_its_path() -> None:
    pair = new_pair()
    assert read_key_pair(share_key_pair(pair)) == pair


@pytest.mark.parametrize(
    "key",
    [
        AllowedKey("", PUBLIC, "read"),
        AllowedKey("a b", PUBLIC, "read"),
        AllowedKey("x" * 17, PUBLIC, "read"),
        AllowedKey("(own engine)", PUBLIC, "engine"),
        AllowedKey("a", PUBLIC[1:], "read"),
        AllowedKey("a", PUBLIC + "x", "read"),
        AllowedKey("a", "~" * 40, "read"),
        AllowedKey("a", PUBLIC, "engine", ("x*",)),
        AllowedKey("a", PUBLIC, "read", ("",)),
        AllowedKey("a", PUBLIC, "read", ("a/b",)),
        AllowedKey("a", PUBLIC, "read", ("x",) * 65),
    ],
)
def test_what_can_not_be_allowed_is_refused(tmp_path: Path, key: AllowedKey) -> None:
    store = KeyStore(tmp_path)
    with pytest.raises(KeyListError):
        store.allow(key)
    assert store.read() == ()


def test_a_name_and_a_key_are_allowed_once(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.allow(AllowedKey("a", PUBLIC, "read"))
    for key in (AllowedKey("a", new_pair().public, "read"), AllowedKey("b", PUBLIC, "read")):
        with pytest.raises(KeyListError, match="already allowed as 'a'"):
            store.allow(key)
    with pytest.raises(KeyListError, match="'b'"):
        store.revoke("b")
    store.revoke("a")
    assert store.read() == ()


def test_no_change_of_several_processes_is_lost(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from loradock.controller.server.keys import AllowedKey, KeyStore, new_pair;"
        "store = KeyStore(Path(sys.argv[1]));"
        "[store.allow(AllowedKey(f'{sys.argv[2]}-{n}', new_pair().public, 'read'))"
        " for n in range(10)]"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    writers = [subprocess.Popen([*command, name], cwd=ROOT) for name in "ab"]
    assert [writer.wait(HANG_S) for writer in writers] == [0, 0]
    expected = {f"{name}-{number}" for name in "ab" for number in range(10)}
    assert {key.name for key in KeyStore(tmp_path).read()} == expected


def test_a_list_in_a_directory_of_others_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "keys").symlink_to(tmp_path / "elsewhere")
    store = KeyStore(tmp_path)
    with pytest.raises(DirectoryRefused, match="is a link"):
        store.allow(AllowedKey("a", PUBLIC, "read"))
    with pytest.raises(DirectoryRefused, match="is a link"):
        store.server_pair()
    assert os.listdir(tmp_path / "elsewhere") == []
    assert KeyPair("p", "s") == KeyPair("p", "s")


def test_every_change_of_the_list_is_noticed(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "d")
    assert store.stamp() == (0, 0, 0)
    store.allow(AllowedKey("a", PUBLIC, "read"))
    path = tmp_path / "d" / "keys" / "allowed.json"
    stamps, status = [store.stamp()], path.stat()
    # The time of modification is set back, as a program does that restores files.
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    stamps.append(store.stamp())
    # Permissions may be what made a list unreadable.
    path.chmod(0o400)
    stamps.append(store.stamp())
    assert len(set(stamps)) == len(stamps)
