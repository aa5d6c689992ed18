"""Laws of reading parts: a part is the whole, cut; it reads its own bytes and no others."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from engine.adapters import read_adapter
from engine.adapters.compatibility import ModelSide
from engine.adapters.files.directory import OpenFile, open_adapter
from engine.adapters.files.safetensors_reader import WeightsReader
from engine.adapters.files.weights_file import ReadTensors
from engine.config import DEFAULT_BOUNDS
from engine.errors import NotFinite
from engine.layout import Shard
from engine.submatrix import ALL, Part, Run, runs_of
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
CUT = ("wide", "tall")


@st.composite
def parts(draw: st.DrawFn, height: int, width: int) -> Part:
    def ranges(length: int, steps: int) -> st.SearchStrategy[range]:
        return st.builds(
            lambda start, count, step: range(start, min(length, start + count * step), step),
            st.integers(0, length - 1),
            st.integers(1, length),
            st.integers(1, steps),
        )

    rows = st.none() | st.lists(ranges(height, 4), min_size=1, max_size=3).map(tuple)
    return Part(draw(rows), draw(st.none() | ranges(width, 1)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("parts") / "a", weights=save(MATRICES))


def by_reader(directory: Path, wanted: dict[str, Part], *, all_of_it: bool) -> ReadTensors:
    with open_adapter(directory.name, [directory.parent]) as files:
        reader = WeightsReader(files.weights, DEFAULT_BOUNDS)
        return reader.read_all(wanted, b"")[0] if all_of_it else reader.read(wanted)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), all_of_it=st.booleans())
def test_a_part_is_the_whole_cut(directory: Path, data: st.DataObject, all_of_it: bool) -> None:
    wanted = {name: data.draw(parts(*MATRICES[name].shape)) for name in CUT}
    found = by_reader(directory, wanted | {"flat": ALL}, all_of_it=all_of_it)
    for name, part in wanted.items():
        columns = slice(None) if part.columns is None else list(part.columns)
        rows = [row for rows in part.rows or (range(len(MATRICES[name])),) for row in rows]
        expected = MATRICES[name][rows][:, columns]
        assert torch.equal(found.tensors[name], expected)
        assert torch.equal(part.cut(MATRICES[name]), expected)
        assert part.shape_in(tuple(MATRICES[name].shape)) == tuple(expected.shape)
        assert found.tensors[name].is_contiguous()
        judged = MATRICES[name] if all_of_it else expected
        assert found.ranges[name] == (judged.min(), judged.max())
    assert torch.equal(found.tensors["flat"], MATRICES["flat"])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_are_the_parts_own_bytes_and_no_others(data: st.DataObject) -> None:
    part = data.draw(parts(6, 5))
    whole = torch.arange(30, dtype=torch.uint8).reshape(6, 5)
    raw = bytes(whole.flatten().tolist())
    found = b"".join(raw[start : start + size] for start, size in runs_of(part, (6, 5), 1))
    assert found == bytes(part.cut(whole).flatten().tolist())


def test_bytes_that_lie_together_are_one_run() -> None:
    shape = (8, 10)
    assert list(runs_of(Part((range(2, 4), range(6, 7))), shape, 2)) == [Run(40, 40), Run(120, 20)]
    assert list(runs_of(Part(columns=range(5, 10)), (2, 10), 2)) == [Run(10, 10), Run(30, 10)]
    assert list(runs_of(ALL, shape, 4)) == [Run(0, 320)]


def test_a_follower_reads_its_part_alone_and_who_fingerprints_reads_all(directory: Path) -> None:
    wanted = {"wide": Part(columns=range(10)), "tall": Part(rows=(range(10, 20),))}
    read_into, counted = OpenFile.read_into, 0

    def counting(self: OpenFile, buffer: memoryview, start: int) -> None:
        nonlocal counted
        counted += len(buffer)
        read_into(self, buffer, start)

    sizes = {}
    for all_of_it in (False, True):
        counted = 0
        with patch.object(OpenFile, "read_into", counting):
            by_reader(directory, wanted, all_of_it=all_of_it)
        sizes[all_of_it] = counted
    whole = (directory / "adapter_model.safetensors").stat().st_size
    parts_bytes = 6 * 10 * 4 + 10 * 6 * 2
    assert sizes[True] == whole
    assert sizes[False] == whole - sum(t.nbytes for t in MATRICES.values()) + parts_bytes


OUTSIDE = [
    Part(columns=range(11)),
    Part(columns=range(0, 10, 2)),
    Part(columns=range(3, 3)),
    Part(columns=range(-1, 3)),
    Part(rows=(range(9),)),
    Part(rows=(range(4), range(8, 9))),
    Part(rows=(range(3, -1, -1),)),
    Part(rows=(range(0),)),
]


@pytest.mark.parametrize("part", OUTSIDE, ids=str)
def test_a_part_outside_the_matrix_is_told(part: Part) -> None:
    with pytest.raises(ValueError, match=r"of (8|10); "):
        part.shape_in((8, 10))


SHARDS = {
    "columns of A": Shard(a_columns=range(8, 16)),
    "rows of B": Shard(b_rows=(range(4, 8), range(2))),
    "every other row of A": Shard(b_rows=(range(8),), rank_parts=2, rank_part=1),
    "both": Shard(a_columns=range(8), b_rows=(range(2, 3),), rank_parts=4, rank_part=2),
}


@pytest.mark.parametrize("name", SHARDS)
def test_who_follows_and_who_leads_keep_what_cutting_the_whole_gives(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "a")
    modules = MODULES | {module: replace(MODULES[module], shard=SHARDS[name]) for module in (Q, V)}
    whole = read_adapter("a", [tmp_path], ModelSide(MODULES, LORA_CONFIG))
    leads = read_adapter("a", [tmp_path], ModelSide(modules, LORA_CONFIG))
    follows = read_adapter("a", [tmp_path], ModelSide(modules, LORA_CONFIG), is_follower=True)
    assert leads.fingerprint == read(path).fingerprint == whole.fingerprint
    assert follows.fingerprint == ""
    for module, lora in whole.model.loras.items():
        expected = lora.cut(SHARDS[name])
        for part in (leads, follows):
            found = part.model.loras[module]
            assert torch.equal(found.lora_a, expected.lora_a)
            assert torch.equal(found.lora_b, expected.lora_b)
            assert (found.rank, found.scaling, found.shard) == (4, 2, SHARDS[name])
    assert leads.host_bytes == follows.host_bytes < whole.host_bytes
    assert leads.blob_bytes == follows.blob_bytes


def test_a_leader_judges_also_what_others_keep_and_a_follower_its_own(tmp_path: Path) -> None:
    bad = tensors(q_A=torch.ones(4, 16))
    bad[key(Q, "A")][1, 15] = torch.nan
    write(tmp_path / "a", weights=bad)
    shard = Shard(a_columns=range(8))
    modules = MODULES | {Q: replace(MODULES[Q], shard=shard)}
    with pytest.raises(NotFinite):
        read_adapter("a", [tmp_path], ModelSide(modules, LORA_CONFIG))
    read_adapter("a", [tmp_path], ModelSide(modules, LORA_CONFIG), is_follower=True)
    other = MODULES | {Q: replace(MODULES[Q], shard=Shard(a_columns=range(8, 16)))}
    with pytest.raises(NotFinite):
        read_adapter("a", [tmp_path], ModelSide(other, LORA_CONFIG), is_follower=True)
