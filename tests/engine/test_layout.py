"""Shards of an adapter: together they are all of it, at the offsets in the directory."""

import pytest
import torch

from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.layout import (
    WHOLE,
    ModuleShape,
    Shard,
    blob_bytes,
    sorted_by_column,
)
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage

IN, OUT, RANK = 12, 10, 6
COLUMN_PARTS = [Shard(b_rows=(range(5),)), Shard(b_rows=(range(5, 10),))]
DIVIDED_PARTS = [Shard(None, part.b_rows, 2, rank) for rank, part in enumerate(COLUMN_PARTS)]
ROW_PARTS = [Shard(a_columns=range(6)), Shard(a_columns=range(6, 12))]


def weights(shard: Shard = WHOLE) -> LoRALayerWeights:
    torch.manual_seed(3)
    whole = LoRALayerWeights("m.1", RANK, 12.0, torch.randn(RANK, IN), torch.randn(OUT, RANK))
    return whole.sharded(shard)


def test_column_parts_together_are_the_whole() -> None:
    parts = [weights(part) for part in COLUMN_PARTS]
    assert torch.equal(torch.cat([part.lora_b for part in parts]), weights().lora_b)
    assert all(torch.equal(part.lora_a, weights().lora_a) for part in parts)


def test_row_parts_together_are_the_whole() -> None:
    parts = [weights(part) for part in ROW_PARTS]
    assert torch.equal(torch.cat([part.lora_a for part in parts], 1), weights().lora_a)


def test_divided_rows_interleave_to_the_whole() -> None:
    parts = [weights(part).lora_a for part in DIVIDED_PARTS]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), weights().lora_a)


def test_rows_are_kept_in_the_order_of_their_ranges() -> None:
    kept = weights(Shard(b_rows=(range(8, 10), range(1, 3)))).lora_b
    assert torch.equal(kept, weights().lora_b[[8, 9, 1, 2]])


def test_a_rank_that_can_not_be_divided_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rank 3 can't be divided among 2.*fully_sharded_loras off"
    ):
        DIVIDED_PARTS[0].select_a(torch.ones(3, IN))


@pytest.mark.parametrize("shard", [WHOLE, *COLUMN_PARTS, *ROW_PARTS, *DIVIDED_PARTS])
def test_the_arena_returns_the_part_that_was_staged(shard: Shard) -> None:
    plain = ModuleShape("m.0", IN, OUT, 0)
    sharded = ModuleShape("m.1", IN, OUT, 1, shard=shard)
    last = ModuleShape("m.2", IN, OUT, 1 + sharded.columns)
    shapes = (last, plain, sharded)
    part = weights(shard)
    model = LoRAModel(1, RANK, {"m.1": part, "m.2": weights()})
    blob = stage(model, shapes, torch.float32)
    assert blob.size_bytes == blob_bytes({"m.1": RANK, "m.2": RANK}, shapes, torch.float32)
    arena = Arena(2, shapes, 1 << 14, torch.float32, "cpu")
    arena.begin_write(0, 1, blob)
    arena.finish_write(0)
    arena.write_slice(1, sharded.index, part.lora_a, part.lora_b)
    arena.check()
    for slot, scaling in ((0, 2.0), (1, 1.0)):
        a, b = arena.weights(slot, sharded.index)
        assert torch.equal(a, part.lora_a)
        assert torch.equal(b, part.lora_b * scaling)
    assert arena.weights(0, last.index)[1].shape == (OUT, RANK)
    assert arena.weights(0, plain.index) is None
    arena.reset_slice(1, sharded.index)
    assert (arena.directory.host_offsets[1] == -1).all()
    assert arena.weights(1, sharded.index) is None
    arena.check()
    arena.close()


def test_divided_rows_have_separate_columns_for_a_and_b() -> None:
    shape = ModuleShape("m.1", IN, OUT, 0, shard=DIVIDED_PARTS[1])
    arena = Arena(1, [shape], 1 << 12, torch.float32, "cpu")
    part = weights(DIVIDED_PARTS[1])
    arena.write_slice(0, 0, part.lora_a, part.lora_b)
    assert arena.directory.host_ranks.tolist() == [[RANK // 2, RANK]]
    a_start, b_start = arena.directory.host_offsets[0].tolist()
    assert torch.equal(arena.data[a_start:][: 3 * IN].view(3, IN), part.lora_a)
    assert torch.equal(arena.data[b_start:][: 5 * RANK].view(5, RANK), part.lora_b)
    arena.close()


def test_columns_with_gaps_are_refused() -> None:
    divided = ModuleShape("m.0", IN, OUT, 0, shard=DIVIDED_PARTS[0])
    assert sorted_by_column([ModuleShape("m.1", IN, OUT, 2), divided])[0] is divided
    with pytest.raises(ValueError, match="without gaps"):
        sorted_by_column([divided, ModuleShape("m.1", IN, OUT, 1)])
