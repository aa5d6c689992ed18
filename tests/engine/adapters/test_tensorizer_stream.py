"""Properties of tensorizer streams: equal to safetensors, bounded, refused when damaged.

Only the first test runs without the extra `loradock[tensorizer]`.
"""

import importlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import AdapterNotFound, AdapterUnsound, EngineError, NotFinite
from loradock.engine.layout import Shard
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    MODULES,
    Q,
    read,
    tensors,
    write,
)

NAME = "adapter_model.tensors"


def write_stream(directory: Path, weights: Mapping[str, torch.Tensor] | bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(dict(CONFIG)))
    raw = weights if isinstance(weights, bytes) else streamed(weights)
    (directory / NAME).write_bytes(raw)
    return directory


def streamed(weights: Mapping[str, torch.Tensor]) -> bytes:
    package = pytest.importorskip("tensorizer")
    buffer = io.BytesIO()
    # The serializer closes its target; the buffer must stay readable.
    buffer.close = lambda: None  # type: ignore[method-assign]
    serializer = package.TensorSerializer(buffer)
    serializer.write_state_dict(dict(weights))
    serializer.close()
    return buffer.getvalue()


def load(path: Path, bounds: AdapterBounds = DEFAULT_BOUNDS) -> LoadedAdapter:
    return read_adapter(
        path.name, [path.parent], AdapterTarget(MODULES, LORA_CONFIG), bounds=bounds
    )


def test_without_the_package_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    with pytest.raises(AdapterNotFound, match=r"loradock\[tensorizer\]"):
        load(write_stream(tmp_path / "a", b"x"))
    write(tmp_path / "a")
    assert load(tmp_path / "a").model.loras, "safetensors come first"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equal_tensors_are_the_same_adapter(tmp_path: Path, dtype: str) -> None:
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors().items()}
    stream = load(write_stream(tmp_path / "a", weights))
    plain = read(write(tmp_path / "b", weights=weights))
    assert stream.model.loras.keys() == plain.model.loras.keys()
    for module, lora in plain.model.loras.items():
        other = stream.model.loras[module]
        assert torch.equal(lora.lora_a, other.lora_a)
        assert torch.equal(lora.lora_b, other.lora_b)
    assert stream.host_bytes == plain.host_bytes
    assert len(stream.fingerprint) == 32
    assert stream.fingerprint != plain.fingerprint


def test_a_rank_keeps_its_part(tmp_path: Path) -> None:
    shard = Shard(a_columns=range(8, 16))
    sharded = MODULES | {Q: type(MODULES[Q])(Q, 16, 16, 0, shard=shard)}
    path = write_stream(tmp_path / "a", tensors())
    whole = load(path).model.loras[Q]
    for is_follower in (False, True):
        part = read_adapter(
            "a", [tmp_path], AdapterTarget(sharded, LORA_CONFIG), is_follower=is_follower
        ).model.loras[Q]
        assert torch.equal(part.lora_a, whole.lora_a[:, 8:])


def test_bounds_are_enforced_and_values_checked(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "a", tensors())
    for bounds, text in (
        (AdapterBounds(weights_bytes_max=1000), "at most 1000 are read"),
        (AdapterBounds(tensors_max=3), "has 4 tensors; at most 3"),
        (AdapterBounds(name_characters_max=20), "at most 20 characters"),
    ):
        with pytest.raises(AdapterUnsound, match=text):
            load(path, bounds)
    with pytest.raises(NotFinite):
        load(write_stream(tmp_path / "b", tensors(q_A=torch.full((4, 16), torch.nan))))


@pytest.mark.parametrize(
    "raw",
    [b"", b"x", b"|TZR|", bytes(5000)],
    ids=["none", "one byte", "a signature alone", "zeros"],
)
def test_a_file_that_is_not_a_stream_is_refused(tmp_path: Path, raw: bytes) -> None:
    pytest.importorskip("tensorizer")
    with pytest.raises(AdapterUnsound, match="can't be read"):
        load(write_stream(tmp_path / "a", raw))


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(streamed(tensors()))
    header = [i for i, byte in enumerate(damaged) if byte][:400]
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.sampled_from(header))] = data.draw(st.integers(0, 255))
    try:
        load(write_stream(tmp_path / "a", bytes(damaged)))
    except EngineError:
        return


def test_the_package_is_imported_only_for_such_a_file(tmp_path: Path) -> None:
    before = "tensorizer" in sys.modules
    importlib.import_module("loradock.engine.adapters")
    assert load(write(tmp_path / "a")).model.loras
    assert ("tensorizer" in sys.modules) == before
