"""The machine's files: a sync in the background ends as one in the foreground does."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.log import storage
from controller.log.storage import DISK


@pytest.fixture(params=["background", "none"])
def _library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test also where the C library has no threads that sync."""
    if request.param == "none":
        monkeypatch.setattr(storage, "_libc", SimpleNamespace())


@pytest.mark.usefixtures("_library")
def test_a_background_sync_ends_and_many_may_follow(tmp_path: Path) -> None:
    fd = DISK.create(tmp_path / "file")
    for number in range(20):
        DISK.write(fd, b"x")
        wait = DISK.begin_sync(fd)
        DISK.write(fd, b"y")
        wait()
        assert DISK.size_bytes(tmp_path / "file") == 2 * (number + 1)
    DISK.close(fd)


@pytest.mark.usefixtures("_library")
def test_a_background_sync_that_fails_raises_when_it_is_waited_for() -> None:
    # A pipe has nothing that could be synced.
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        DISK.begin_sync(writing)()
    os.close(reading)
    os.close(writing)


def test_a_background_sync_ends_before_its_memory_is_freed(tmp_path: Path) -> None:
    fd = DISK.create(tmp_path / "file")
    for _ in range(20):
        DISK.write(fd, b"x")
        DISK.begin_sync(fd)
    DISK.close(fd)
    assert DISK.read(tmp_path / "file") == b"x" * 20
