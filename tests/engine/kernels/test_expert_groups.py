"""The groups of an experts layer's rows: every pair once, sorted, and tiled within the bounds."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from loradock.engine.kernels.expert_groups import NO_GROUP, group_experts, sort_by_expert
from loradock.engine.kernels.operands import TILE_ROWS, GroupBounds
from tests.support.kernels.expert_cases import TOP_K, routed
from tests.support.kernels.kernel_cases import groups_of, mixed_rows


def test_groups_are_pairs_sorted_by_slot_and_expert() -> None:
    random = Random(11)
    rows, routing = mixed_rows(random, 40, 6), routed(40, 7, "elsewhere", random)
    groups = group_experts(groups_of(rows), lambda slot: slot != 2, routing.top_k_index, 7)
    assert groups is not None
    experts = routing.top_k_index.flatten().tolist()
    grouped = {
        pair: rows[pair // TOP_K] * 7 + expert
        for pair, expert in enumerate(experts)
        if rows[pair // TOP_K] >= 0 and expert < 7
    }
    assert sorted(groups.pairs.tolist()) == list(range(120))
    keys = [grouped.get(pair, NO_GROUP) for pair in groups.pairs.tolist()]
    assert groups.keys.tolist() == keys == sorted(keys)
    order = list(zip(keys, groups.pairs.tolist(), strict=True))
    assert order == sorted(order)
    assert groups.slots == tuple(sorted(set(rows) - {-1, 2}))
    assert [span.slot for span in groups.spans] == list(groups.slots)
    for slot, start, end, experts, sizes in groups.spans:
        own = [key for key in keys if key // 7 == slot]
        assert keys[start:end] == own
        assert dict(zip(experts, sizes, strict=True)) == Counter(key % 7 for key in own)


@pytest.mark.parametrize("block_m", TILE_ROWS)
@pytest.mark.parametrize("how", ["spread", "one", "elsewhere"])
def test_tiles_hold_every_grouped_pair_once(how: str, block_m: int) -> None:
    random = Random(13)
    rows, routing = mixed_rows(random, 90, 4), routed(90, 5, how, random)
    groups = group_experts(groups_of(rows), lambda _: True, routing.top_k_index, 5)
    assert groups is not None
    firsts, keys = groups.tile_starts(block_m), groups.keys.tolist()
    assert len(firsts) == groups.bounds.max_tiles(block_m)
    real = [first for first in firsts.tolist() if first < len(keys)]
    assert firsts.tolist() == real + [len(keys)] * (len(firsts) - len(real))
    held = [
        index
        for first in real
        for index in range(first, min(first + block_m, len(keys)))
        if keys[index] == keys[first]
    ]
    assert held == [index for index, key in enumerate(keys) if key != NO_GROUP]


def test_pairs_are_grouped_and_tiled_without_reading_the_device() -> None:
    groups = groups_of([0, -1, 2, 1])
    there = replace(groups, token_slots=groups.token_slots.to("meta"))
    found = group_experts(there, lambda _: True, torch.zeros(4, 2, dtype=int, device="meta"), 5)
    assert found is not None
    assert found.bounds == GroupBounds(8, 8, groups.bounds.rank)
    # A value on the meta device can't be read, so a launch's size can't depend on one.
    assert [len(found.with_rows(found.pairs).tile_starts(block_m)) for block_m in TILE_ROWS] == [
        8,
        8,
    ]
    with pytest.raises((NotImplementedError, RuntimeError)):
        found.spans  # noqa: B018 - made on first access


def test_a_batch_without_weights_here_has_no_groups() -> None:
    routing = routed(4, 5, "spread", Random(1))
    assert group_experts(groups_of([-1] * 4), lambda _: True, routing.top_k_index, 5) is None
    assert group_experts(groups_of([0, 1, 1, -1]), lambda _: False, routing.top_k_index, 5) is None


def test_pairs_sorted_by_expert_can_be_restored() -> None:
    routing = routed(20, 6, "elsewhere", Random(2))
    order = sort_by_expert(routing.top_k_index, 6)
    flat = routing.top_k_index.flatten()
    assert torch.equal(order.experts, flat.sort(stable=True).values)
    assert torch.equal(order.experts[order.row_of_pair], flat)
    assert torch.equal(order.tokens[order.row_of_pair], torch.arange(60) // TOP_K)
    assert order.ends.tolist() == [int((flat <= expert).sum()) for expert in range(6)]
