"""The controller's directories: of its user alone, and no links."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from loradock.controller.server.keys import (
    DirectoryRefused,
    check_controller_directory,
)

OTHER_UID = os.geteuid() + 1

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def link(name: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory.parent / "elsewhere").mkdir()
        (directory / name).symlink_to(directory.parent / "elsewhere")

    return make


def dangling(directory: Path) -> None:
    (directory / "run").symlink_to(directory / "nowhere")


def file(directory: Path) -> None:
    (directory / "run").touch()


def in_directory(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def made(directory: Path) -> None:
        (directory / name).mkdir(mode=0o700)
        make(directory / name)

    return made


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _give_away(path: Path) -> None:
    path.touch()
    os.chown(path, OTHER_UID, -1)


def foreign(name: str) -> Callable[[Path], None]:
    def made(directory: Path) -> None:
        (directory / name).mkdir(mode=0o700, exist_ok=True)
        os.chown(directory / name, OTHER_UID, -1)

    return made


def foreign_socket(directory: Path) -> None:
    (directory / "run").mkdir(mode=0o700)
    _bind(directory / "run" / "requests.sock")
    os.chown(directory / "run" / "requests.sock", OTHER_UID, -1)


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "run is a link": (link("run"), "is a link"),
    "log is a link": (link("log"), "is a link"),
    "keys is a link": (link("keys"), "is a link"),
    "run is a dangling link": (dangling, "is a link"),
    "run is a file": (file, "Not a directory"),
    "a file in the place of a socket": (
        in_directory("run", lambda run: (run / "requests.sock").touch()),
        "not a socket",
    ),
    "a link in the place of a socket": (
        in_directory("run", lambda run: (run / "events.sock").symlink_to("/tmp/other")),
        "is a link",
    ),
    "a link in the log": (
        in_directory("log", lambda log: (log / "1.log").symlink_to("/etc/passwd")),
        "is a link",
    ),
    "a socket in the log": (in_directory("log", lambda log: _bind(log / "x")), "is a socket"),
    "writable by a group": (lambda d: d.chmod(0o770), "chmod go-w"),
    "writable by others": (lambda d: d.chmod(0o702), "chmod go-w"),
}
FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "run of another user": (foreign("run"), "belongs to user"),
    "log of another user": (foreign("log"), "belongs to user"),
    "keys of another user": (foreign("keys"), "belongs to user"),
    "the directory of another user": (foreign("."), "belongs to user"),
    "a socket of another user": (foreign_socket, "belongs to user"),
    "a log file of another user": (
        in_directory("log", lambda log: _give_away(log / "1.log")),
        "belongs to user",
    ),
    "a list of keys of another user": (
        in_directory("keys", lambda keys: _give_away(keys / "allowed.json")),
        "belongs to user",
    ),
}


def check(directory: Path, make: Callable[[Path], None], text: str) -> None:
    directory.mkdir(mode=0o700)
    make(directory)
    with pytest.raises(DirectoryRefused, match=text):
        check_controller_directory(directory)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_directory_is_refused(tmp_path: Path, wrong: str) -> None:
    check(tmp_path / "d", *WRONG[wrong])


@needs_root
@pytest.mark.parametrize("wrong", FOREIGN)
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, wrong: str) -> None:
    check(tmp_path / "d", *FOREIGN[wrong])


def test_directories_are_made_for_their_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "x" / "d"
    check_controller_directory(directory)
    assert sorted(os.listdir(directory)) == ["keys", "log", "run"]
    modes = [stat.S_IMODE((directory / name).stat().st_mode) for name in ("", "keys", "log", "run")]
    assert modes == [0o700] * 4


def test_permissions_of_others_are_removed_and_links_to_the_directory_followed(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "d"
    for name in ("run", "log"):
        (directory / name).mkdir(parents=True)
        (directory / name).chmod(0o755)
    (directory / "log" / "1.log").touch()
    _bind(directory / "run" / "requests.sock")
    (tmp_path / "link").symlink_to(directory)
    check_controller_directory(tmp_path / "link")
    assert stat.S_IMODE((directory / "run").stat().st_mode) == 0o700
