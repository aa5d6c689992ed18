"""Large files that were checked are read again without another check, until they change."""

import os
from pathlib import Path

import pytest
import torch

from loradock.engine.adapters import LoadedAdapter, read_adapter, weights
from loradock.engine.adapters.reader import KnownFiles
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.weights import ValueRange, value_range
from loradock.engine.errors import NotFinite
from tests.support.engine.adapter_examples import LORA_CONFIG, MODULES, tensors, write


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors whose values were measured."""
    found: list[torch.Tensor] = []

    def measure(tensor: torch.Tensor) -> ValueRange:
        found.append(tensor)
        return value_range(tensor)

    monkeypatch.setattr(weights, "value_range", measure)
    return found


def read(path: Path, known: KnownFiles) -> LoadedAdapter:
    target = AdapterTarget(MODULES, LORA_CONFIG)
    return read_adapter(path.name, [path.parent], target, known_files=known)


def matrices(loaded: LoadedAdapter) -> list[torch.Tensor]:
    return [one for lora in loaded.model.loras.values() for one in (lora.lora_a, lora.lora_b)]


def test_unchanged_files_are_read_again_without_a_check(
    tmp_path: Path, measured: list[torch.Tensor]
) -> None:
    path, known = write(tmp_path / "a"), KnownFiles(bytes_min=0)
    first = read(path, known)
    assert len(measured) == len(tensors())
    again = read(path, known)
    assert len(measured) == len(tensors())
    assert (again.fingerprint, again.rank) == (first.fingerprint, first.rank)
    assert again.stamp == first.stamp
    for one, other in zip(matrices(first), matrices(again), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_changed_files_are_checked_again(
    tmp_path: Path, measured: list[torch.Tensor], name: str
) -> None:
    path, known = write(tmp_path / "a"), KnownFiles(bytes_min=0)
    read(path, known)
    measured.clear()
    # As after any write; that of a test could have the same time.
    os.utime(path / name, ns=(1, 1))
    read(path, known)
    assert len(measured) == len(tensors())


def test_another_value_in_known_files_is_refused(tmp_path: Path) -> None:
    path, known = write(tmp_path / "a"), KnownFiles(bytes_min=0)
    read(path, known)
    changed = tensors()
    next(iter(changed.values()))[0, 0] = float("nan")
    write(path, weights=changed)
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))
    for _ in range(2):
        with pytest.raises(NotFinite):
            read(path, known)


def test_small_files_are_not_known(tmp_path: Path, measured: list[torch.Tensor]) -> None:
    path, known = write(tmp_path / "a"), KnownFiles()
    for _ in range(2):
        read(path, known)
    assert len(measured) == 2 * len(tensors())
