"""Properties of `.bin` and `.pt`: read only if allowed, only as tensors, within bounds."""

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loradock.engine.adapters import LoadedAdapter, LoRAModel, PEFTHelper, read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import AdapterNotFound, AdapterUnsound, Conflict, EngineError, NotFinite
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    MODULES,
    Q,
    key,
    read,
    tensors,
    write,
)

PLAIN = tensors()


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def write_pickle(directory: Path, weights: bytes, name: str = "adapter_model.bin") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(dict(CONFIG)))
    (directory / name).write_bytes(weights)
    return directory


def load(
    path: Path, *, allow_pickled: bool = True, bounds: AdapterBounds = DEFAULT_BOUNDS
) -> LoadedAdapter:
    roots = [path.parent]
    side = AdapterTarget(MODULES, LORA_CONFIG)
    return read_adapter(path.name, roots, side, bounds=bounds, allow_pickled=allow_pickled)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_equal_tensors_are_the_same_adapter_in_each_format(tmp_path: Path, name: str) -> None:
    pickled = load(write_pickle(tmp_path / "a", saved(PLAIN), name))
    plain = read(write(tmp_path / "b", weights=PLAIN))
    assert pickled.model.loras.keys() == plain.model.loras.keys()
    for module, lora in plain.model.loras.items():
        other = pickled.model.loras[module]
        assert torch.equal(lora.lora_a, other.lora_a)
        assert torch.equal(lora.lora_b, other.lora_b)
    assert (pickled.rank, pickled.blob_bytes) == (plain.rank, plain.blob_bytes)
    assert pickled.fingerprint != plain.fingerprint
    again = load(write_pickle(tmp_path / "c", saved(PLAIN), name))
    assert (again.fingerprint == pickled.fingerprint) == (
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    )
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    assert load(tmp_path / "a").fingerprint != pickled.fingerprint


def test_a_pickle_is_read_only_if_allowed_and_without_safetensors(tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "a", saved(PLAIN))
    with pytest.raises(AdapterNotFound, match="--allow-pickled-weights"):
        load(path, allow_pickled=False)
    other = {name: tensor + 1 for name, tensor in PLAIN.items()}
    write(path, weights=other)
    lora = load(path).model.loras[Q]
    assert torch.equal(lora.lora_a, other[key(Q, "A")])
    helper = PEFTHelper.from_dict(CONFIG)
    path = write_pickle(tmp_path / "b", saved(PLAIN))
    with pytest.raises(AdapterNotFound, match="pickled weights are not read"):
        LoRAModel.from_local_checkpoint(str(path), {"q_proj", "v_proj"}, helper)
    model = LoRAModel.from_local_checkpoint(
        str(path), {"q_proj", "v_proj"}, helper, allow_pickled=True
    )
    assert model.loras.keys() == read(write(tmp_path / "c")).model.loras.keys()


def test_tensors_that_share_memory_or_are_transposed_are_copied(tmp_path: Path) -> None:
    block = torch.randn(64, 16)
    shared = {name: block[:4] if t.shape == (4, 16) else t for name, t in PLAIN.items()}
    shared[key(Q, "B")] = torch.randn(4, 16).T
    loaded = load(write_pickle(tmp_path / "a", saved(shared)))
    lora = loaded.model.loras[Q]
    assert torch.equal(lora.lora_a, block[:4])
    assert torch.equal(lora.lora_b, shared[key(Q, "B")])
    assert lora.lora_a.untyped_storage().nbytes() == 4 * 16 * 4
    assert loaded.host_bytes == sum(tensor.nbytes for tensor in shared.values())


class Evil:
    """An object whose unpickling creates a file."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (Path("/tmp/loradock-unpickled"),))


def rezipped(method: int) -> bytes:
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(PLAIN))) as old,
        zipfile.ZipFile(target, "w", method) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return target.getvalue()


def overlapping() -> bytes:
    """Return an archive of many entries over the same bytes: small, but large when read."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data/0", bytes(1 << 16))
        first = archive.infolist()[0]
        for number in range(1, 100):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.file_size = entry.compress_size = first.file_size
            entry.header_offset, entry.CRC = first.header_offset, first.CRC
            archive.filelist.append(entry)
            archive.NameToInfo[entry.filename] = entry
        archive._didModify = True
    return target.getvalue()


def with_two_directories() -> bytes:
    """Return two archives in a row: zipfile finds the second, torch's reader the first.

    The end of an archive has 98 bytes: the 64-bit record, 20 for its offset, 22 for the old record.
    """
    first, second = saved({"x": Evil()}), saved(PLAIN)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(first) - 98, 1)
    return first + second[:-42] + locator + second[-22:]


def after_other_bytes() -> bytes:
    """Return an archive that starts after other bytes, which only zipfile corrects for."""
    return bytes(64) + saved(PLAIN)


MALFORMED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not an archive"),
    "text": (b"not an archive", "not an archive"),
    "cut short": (saved(PLAIN)[:-30], "not an archive"),
    "of before 2020": (saved(PLAIN, _use_new_zipfile_serialization=False), "not an archive"),
    "a bare pickle": (pickle.dumps(PLAIN), "not an archive"),
    "compressed": (rezipped(zipfile.ZIP_DEFLATED), "compressed; save it uncompressed"),
    "overlapping": (overlapping(), "they overlap"),
    "two directories": (with_two_directories(), "does not end like"),
    "after other bytes": (after_other_bytes(), "does not end like"),
    "with a comment": (saved(PLAIN)[:-2] + b"\1\0!", "does not end like"),
    "code": (saved({"x": Evil()}), "contains more than tensors"),
    "code and tensors": (saved(PLAIN | {"x": Evil()}), "contains more than tensors"),
    "a whole model": (saved(torch.nn.Linear(2, 2)), "contains more than tensors"),
    "a list": (saved(list(PLAIN.values())), "must contain a dict of tensors, got list"),
    "a tensor": (saved(torch.ones(2)), "must contain a dict of tensors, got Tensor"),
    "a number": (saved(PLAIN | {"x": 1}), "'x' must be a dense CPU tensor with values, got int"),
    "a nested dict": (
        saved({"model": PLAIN}),
        "'model' must be a dense CPU tensor with values, got dict",
    ),
    "a number for a name": (saved({1: torch.ones(2)}), "has a tensor named 1"),
    "a name of two lines": (saved({"a\nb": torch.ones(2)}), "printable ASCII"),
    "a long name": (saved({"a" * 600: torch.ones(2)}), "at most 512"),
    "a sparse tensor": (
        saved({"x": torch.eye(3).to_sparse()}),
        "must be a dense CPU tensor with values",
    ),
    "an empty tensor": (saved({"x": torch.ones(0, 3)}), "must be a dense CPU tensor with values"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_content_other_than_tensors_by_name_is_refused(tmp_path: Path, name: str) -> None:
    raw, text = MALFORMED[name]
    with pytest.raises(AdapterUnsound) as caught:
        load(write_pickle(tmp_path / "a", raw))
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not Path("/tmp/loradock-unpickled").exists()


def test_bounds_are_enforced(tmp_path: Path) -> None:
    path = write_pickle(
        tmp_path / "a", saved(PLAIN | {f"mtp.{i}": torch.ones(1) for i in range(30)})
    )
    assert load(path).model.loras
    for bounds, text in (
        (AdapterBounds(weights_bytes_max=1000), "at most 1000 are read"),
        (AdapterBounds(tensors_max=10), "at most 10 tensors"),
        (AdapterBounds(header_bytes_max=500), "a pickle of"),
        (AdapterBounds(name_characters_max=20), "at most 20 characters"),
    ):
        with pytest.raises(AdapterUnsound, match=text):
            load(path, bounds=bounds)


def test_values_are_checked_and_an_expanded_tensor_is_not_materialised(tmp_path: Path) -> None:
    bad = tensors(q_A=torch.full((4, 16), torch.nan))
    with pytest.raises(NotFinite):
        load(write_pickle(tmp_path / "a", saved(bad)))
    expanded = tensors() | {key(Q, "A"): torch.ones(1).expand(4, 1 << 40)}
    with pytest.raises(EngineError, match="has 16 inputs and 16 outputs"):
        load(write_pickle(tmp_path / "b", saved(expanded)))


@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(saved(PLAIN))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        load(write_pickle(tmp_path / "a", bytes(damaged)))
    except (AdapterUnsound, EngineError, Conflict):
        return
