"""Properties of reading parts: a part equals that of the whole, and only its bytes are read."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from loradock.engine.adapters import read_adapter
from loradock.engine.adapters.directory import OpenFile, open_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.weights import ReadTensors, SafetensorsFile, TensorQuery
from loradock.engine.config import DEFAULT_BOUNDS
from loradock.engine.errors import NotFinite
from loradock.engine.layout import Shard
from loradock.engine.submatrix import WHOLE_TENSOR, ByteRange, Submatrix, byte_ranges_of
from tests.support.engine.adapter_examples import (
    LORA_CONFIG,
    MODULES,
    Q,
    V,
    key,
    read,
    tensors,
    write,
)

MATRICES = {
    "wide": torch.arange(6 * 40).reshape(6, 40).float(),
    "tall": torch.arange(40 * 6).reshape(40, 6).to(torch.bfloat16),
    "flat": torch.arange(5).to(torch.float64),
}
DIVIDED = ("wide", "tall")


@st.composite
def submatrices(draw: st.DrawFn, height: int, width: int) -> Submatrix:
    def ranges(length: int, steps: int) -> st.SearchStrategy[range]:
        return st.builds(
            lambda start, count, step: range(start, min(length, start + count * step), step),
            st.integers(0, length - 1),
            st.integers(1, length),
            st.integers(1, steps),
        )

    rows = st.none() | st.lists(ranges(height, 4), min_size=1, max_size=3).map(tuple)
    return Submatrix(draw(rows), draw(st.none() | ranges(width, 1)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("parts") / "a", weights=save(MATRICES))


def by_reader(
    directory: Path, wanted: dict[str, Submatrix], *, with_fingerprint: bool
) -> ReadTensors:
    with open_adapter(directory.name, [directory.parent]) as files:
        reader = SafetensorsFile(files.weights[0], DEFAULT_BOUNDS)
        return reader.read(TensorQuery(wanted, config=b"" if with_fingerprint else None))


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), with_fingerprint=st.booleans())
def test_a_part_equals_that_of_the_whole(
    directory: Path, data: st.DataObject, with_fingerprint: bool
) -> None:
    wanted = {name: data.draw(submatrices(*MATRICES[name].shape)) for name in DIVIDED}
    found = by_reader(directory, wanted | {"flat": WHOLE_TENSOR}, with_fingerprint=with_fingerprint)
    for name, part in wanted.items():
        columns = slice(None) if part.columns is None else list(part.columns)
        rows = [row for rows in part.rows or (range(len(MATRICES[name])),) for row in rows]
        expected = MATRICES[name][rows][:, columns]
        assert torch.equal(found.tensors[name], expected)
        assert torch.equal(part.select(MATRICES[name]), expected)
        assert part.shape_in(tuple(MATRICES[name].shape)) == tuple(expected.shape)
        assert found.tensors[name].is_contiguous()
        ranged = MATRICES[name] if with_fingerprint else expected
        assert found.ranges[name] == (ranged.min(), ranged.max())
    assert torch.equal(found.tensors["flat"], MATRICES["flat"])


@settings(max_examples=100)
@given(st.data())
def test_byte_ranges_are_the_bytes_of_the_submatrix_and_no_others(data: st.DataObject) -> None:
    part = data.draw(submatrices(6, 5))
    whole = torch.arange(30, dtype=torch.uint8).reshape(6, 5)
    raw = bytes(whole.flatten().tolist())
    found = b"".join(raw[start : start + size] for start, size in byte_ranges_of(part, (6, 5), 1))
    assert found == bytes(part.select(whole).flatten().tolist())


def test_adjacent_bytes_are_one_range() -> None:
    shape = (8, 10)
    assert list(byte_ranges_of(Submatrix((range(2, 4), range(6, 7))), shape, 2)) == [
        ByteRange(40, 40),
        ByteRange(120, 20),
    ]
    assert list(byte_ranges_of(Submatrix(columns=range(5, 10)), (2, 10), 2)) == [
        ByteRange(10, 10),
        ByteRange(30, 10),
    ]
    assert list(byte_ranges_of(WHOLE_TENSOR, shape, 4)) == [ByteRange(0, 320)]


def test_only_the_fingerprint_needs_the_bytes_outside_the_parts(directory: Path) -> None:
    wanted = {"wide": Submatrix(columns=range(10)), "tall": Submatrix(rows=(range(10, 20),))}
    read_into, counted = OpenFile.read_into, 0

    def counting(self: OpenFile, buffer: memoryview, start: int) -> None:
        nonlocal counted
        counted += len(buffer)
        read_into(self, buffer, start)

    sizes = {}
    for with_fingerprint in (False, True):
        counted = 0
        with patch.object(OpenFile, "read_into", counting):
            by_reader(directory, wanted, with_fingerprint=with_fingerprint)
        sizes[with_fingerprint] = counted
    whole = (directory / "adapter_model.safetensors").stat().st_size
    parts_bytes = 6 * 10 * 4 + 10 * 6 * 2
    assert sizes[True] == whole
    assert sizes[False] == whole - sum(t.nbytes for t in MATRICES.values()) + parts_bytes


OUTSIDE = [
    Submatrix(columns=range(11)),
    Submatrix(columns=range(0, 10, 2)),
    Submatrix(columns=range(3, 3)),
    Submatrix(columns=range(-1, 3)),
    Submatrix(rows=(range(9),)),
    Submatrix(rows=(range(4), range(8, 9))),
    Submatrix(rows=(range(3, -1, -1),)),
    Submatrix(rows=(range(0),)),
]


@pytest.mark.parametrize("part", OUTSIDE, ids=str)
def test_a_submatrix_outside_the_matrix_is_refused(part: Submatrix) -> None:
    with pytest.raises(ValueError, match=r"of (8|10); "):
        part.shape_in((8, 10))


SHARDS = {
    "columns of A": Shard(a_columns=range(8, 16)),
    "rows of B": Shard(b_rows=(range(4, 8), range(2))),
    "every other row of A": Shard(b_rows=(range(8),), rank_parts=2, rank_part=1),
    "both": Shard(a_columns=range(8), b_rows=(range(2, 3),), rank_parts=4, rank_part=2),
}


@pytest.mark.parametrize("name", SHARDS)
def test_leader_and_follower_keep_the_shard_of_the_whole(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a")
    modules = MODULES | {module: replace(MODULES[module], shard=SHARDS[name]) for module in (Q, V)}
    whole = read_adapter("a", [tmp_path], AdapterTarget(MODULES, LORA_CONFIG))
    leader = read_adapter("a", [tmp_path], AdapterTarget(modules, LORA_CONFIG))
    follower = read_adapter("a", [tmp_path], AdapterTarget(modules, LORA_CONFIG), is_follower=True)
    assert leader.fingerprint == read(path).fingerprint == whole.fingerprint
    assert follower.fingerprint == ""
    for module, lora in whole.model.loras.items():
        expected = lora.sharded(SHARDS[name])
        for part in (leader, follower):
            found = part.model.loras[module]
            assert torch.equal(found.lora_a, expected.lora_a)
            assert torch.equal(found.lora_b, expected.lora_b)
            assert (found.rank, found.scaling, found.shard) == (4, 2, SHARDS[name])
    assert leader.host_bytes == follower.host_bytes < whole.host_bytes
    assert leader.blob_bytes == follower.blob_bytes


def test_a_leader_checks_the_values_of_whole_tensors_and_a_follower_of_its_part(
    tmp_path: Path,
) -> None:
    bad = tensors(q_A=torch.ones(4, 16))
    bad[key(Q, "A")][1, 15] = torch.nan
    write(tmp_path / "a", weights=bad)
    shard = Shard(a_columns=range(8))
    modules = MODULES | {Q: replace(MODULES[Q], shard=shard)}
    with pytest.raises(NotFinite):
        read_adapter("a", [tmp_path], AdapterTarget(modules, LORA_CONFIG))
    read_adapter("a", [tmp_path], AdapterTarget(modules, LORA_CONFIG), is_follower=True)
    other = MODULES | {Q: replace(MODULES[Q], shard=Shard(a_columns=range(8, 16)))}
    with pytest.raises(NotFinite):
        read_adapter("a", [tmp_path], AdapterTarget(other, LORA_CONFIG), is_follower=True)
