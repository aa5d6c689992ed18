"""The command that writes the example."""

import errno
import os
from pathlib import Path

import pytest

from tests.support.simulation.command_runs import run


def test_the_example_is_written_once(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    result = run("example", str(directory))
    assert result.exit_code == 0, result.output
    assert (directory / "model" / "config.json").is_file()
    assert len(list((directory / "adapters").iterdir())) == 8
    again = run("example", str(directory))
    assert again.exit_code == 2
    assert "exists; name a new directory" in again.stderr


def test_an_example_for_which_the_disk_has_no_space_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(source: object, target: object, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))

    monkeypatch.setattr("shutil.copystat", fail)
    directory = tmp_path / "tiny"
    result = run("example", str(directory))
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith(f"{directory}: it can't be written: ")
    assert "No space left on device" in line
    assert not directory.exists()


def test_what_another_process_writes_meanwhile_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = tmp_path / "tiny"
    make = Path.mkdir

    def make_late(path: Path, *arguments: object, **options: object) -> None:
        make(directory, exist_ok=True)
        (directory / "other").touch()
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", make_late)
    result = run("example", str(directory))
    assert result.exit_code == 2
    assert "exists; name a new directory" in result.stderr
    assert [path.name for path in directory.iterdir()] == ["other"]


@pytest.mark.parametrize("directory", ["/proc/x", "/dev/null/x"])
def test_a_place_where_nothing_can_be_written_is_named(directory: str) -> None:
    result = run("example", directory)
    assert result.exit_code == 1
    [line] = result.stderr.splitlines()
    assert line.startswith(f"{directory}: ")
