"""Files beside adapters are read below the roots alone, whatever their names lead to."""

import os
from pathlib import Path
from typing import Any

import pytest

from loradock.gateway.inference.adapter_files import AdapterDirectory, FileRefused, NotReadable
from loradock.processes.safe_open import NotAllowed, NotFound


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root" / "a"
    directory.mkdir(parents=True)
    (directory / "f").write_text("text")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_text("secret")
    return tmp_path / "root"


def read(path: Any, root: Any, name: Any = "f", bytes_max: int = 100) -> Any:
    with AdapterDirectory(str(path), [str(root)]) as directory:
        return directory.read(name, bytes_max)


def test_a_path_is_absolute_or_relative_to_a_root(root: Any) -> None:
    assert read("a", root) == read(root / "a", root) == "text"
    with AdapterDirectory("a", [str(root / "none"), str(root)]) as directory:
        assert directory.read("f", 4) == "text"
        assert directory.read("missing", 4) is None
        assert directory.read("f/below", 4) is None


@pytest.mark.parametrize("path", ["../secret", "link", "missing", "a/f"])
def test_directories_that_the_engine_would_not_read_are_not_readable(root: Any, path: Any) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    with pytest.raises((NotAllowed, NotFound)):
        read(path, root)


def test_files_that_the_engine_would_not_read_are_not_readable(root: Any) -> None:
    directory = root / "a"
    (directory / "out").symlink_to(root.parent / "secret" / "f")
    os.link(root.parent / "secret" / "f", directory / "second")
    os.mkfifo(directory / "pipe")
    for name in ("out", "second", "pipe"):
        with pytest.raises(NotReadable, match=name):
            read("a", root, name)


def test_long_files_and_other_bytes_are_refused(root: Any) -> None:
    assert read("a", root, bytes_max=4) == "text"
    with pytest.raises(FileRefused, match="4 bytes"):
        read("a", root, bytes_max=3)
    (root / "a" / "f").write_bytes(b"\xff")
    with pytest.raises(FileRefused, match="UTF-8"):
        read("a", root)
