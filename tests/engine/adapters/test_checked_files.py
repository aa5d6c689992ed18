"""Files that were checked are loaded without another check or read, until they change."""

import gc
import os
import time
import weakref
from pathlib import Path

import pytest
import torch

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.checked_files import CheckedFiles
from loradock.engine.adapters.compatibility import AdapterTarget
from loradock.engine.adapters.files import safetensors_reader
from loradock.engine.adapters.files.weights_file import ValueRange, value_range
from loradock.engine.errors import NotFinite
from tests.support.engine.adapter_examples import LORA_CONFIG, MODULES, tensors, write


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors whose values were looked at."""
    found: list[torch.Tensor] = []

    def measure(tensor: torch.Tensor) -> ValueRange:
        found.append(tensor)
        return value_range(tensor)

    monkeypatch.setattr(safetensors_reader, "value_range", measure)
    return found


def read(
    path: Path, checked: CheckedFiles | None, *, is_check: bool = False, is_follower: bool = False
) -> LoadedAdapter:
    target = AdapterTarget(MODULES, LORA_CONFIG)
    return read_adapter(
        path.name,
        [path.parent],
        target,
        is_follower=is_follower,
        checked=checked,
        is_check=is_check,
    )


def weights(loaded: LoadedAdapter) -> list[torch.Tensor]:
    return [one for lora in loaded.model.loras.values() for one in (lora.lora_a, lora.lora_b)]


def test_unchanged_files_are_read_again_without_a_check(
    tmp_path: Path, measured: list[torch.Tensor]
) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    first = read(path, checked)
    looks = len(measured)
    again = read(path, checked)
    assert looks == len(measured) == len(tensors())
    assert (again.fingerprint, again.rank) == (first.fingerprint, first.rank)
    assert again.stamp == first.stamp
    for one, other in zip(weights(first), weights(again), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_changed_files_are_checked_again(
    tmp_path: Path, measured: list[torch.Tensor], name: str
) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    read(path, checked)
    measured.clear()
    # As after any write; a test's own one could have the same time.
    os.utime(path / name, ns=(1, 1))
    read(path, checked)
    assert len(measured) == len(tensors())


def test_another_value_in_checked_files_is_refused(tmp_path: Path) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    read(path, checked)
    changed = tensors()
    next(iter(changed.values()))[0, 0] = float("nan")
    write(path, weights=changed)
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))
    for _ in range(2):
        with pytest.raises(NotFinite):
            read(path, checked)


def test_a_check_of_few_bytes_is_not_remembered(
    tmp_path: Path, measured: list[torch.Tensor]
) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles()
    for _ in range(2):
        read(path, checked)
    assert len(measured) == 2 * len(tensors())


@pytest.mark.parametrize("is_follower", [False, True])
def test_a_load_after_a_check_reads_nothing(tmp_path: Path, is_follower: bool) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    found = read(path, checked, is_check=True, is_follower=is_follower)
    assert read(path, checked, is_follower=is_follower) is found


def test_an_adapter_is_taken_once(tmp_path: Path) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    found = read(path, checked, is_check=True)
    loads = [read(path, checked) for _ in range(3)]
    assert loads[0] is found
    assert len({id(one.model) for one in loads}) == 3


def test_a_check_reads_again(tmp_path: Path) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    first = read(path, checked, is_check=True)
    second = read(path, checked, is_check=True)
    assert second is not first
    assert read(path, checked) is second


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_files_that_change_after_a_check_are_read(tmp_path: Path, name: str) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0)
    found = read(path, checked, is_check=True)
    os.utime(path / name, ns=(1, 1))
    assert read(path, checked) is not found


def test_only_the_last_check_is_kept(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    checked = CheckedFiles(bytes_min=0)
    found = [read(path, checked, is_check=True) for path in (first, second)]
    assert read(first, checked) is not found[0]
    assert read(second, checked) is found[1]


def test_an_adapter_that_no_load_takes_is_freed(tmp_path: Path) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0, kept_s=0.01)
    model = weakref.ref(read(path, checked, is_check=True).model)
    while model() is not None:
        time.sleep(0.01)
        gc.collect()


def test_an_adapter_that_was_taken_is_freed_with_its_last_user(tmp_path: Path) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0, kept_s=3600)
    read(path, checked, is_check=True)
    model = weakref.ref(read(path, checked).model)
    gc.collect()
    assert model() is None


def test_a_load_is_not_kept(tmp_path: Path) -> None:
    path, checked = write(tmp_path / "a"), CheckedFiles(bytes_min=0, kept_s=3600)
    model = weakref.ref(read(path, checked).model)
    gc.collect()
    assert model() is None
