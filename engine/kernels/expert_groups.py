"""Which rows of an experts layer belong to which slot and expert.

What it is: the grouping that expert kernels read, made anew for every layer and batch, because each
layer routes for itself. What it is not: a decision who is routed where. One rule: tensor operations
alone; nothing waits for the device, and nothing loops over tokens, experts or pairs.

A *pair* is a token and one of the experts that it was routed to: `t * top_k + k` for token `t`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.kernels.operands import GroupBounds, Groups

NO_GROUP: Final = 1 << 62
"""The key of pairs that no adapter of this rank touches: of base rows, and of others' experts."""


class ExpertSpan(NamedTuple):
    """The pairs of one slot, `groups.pairs[start:end]`: `sizes[i]` of them go to `experts[i]`."""

    slot: int
    start: int
    end: int
    experts: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class ExpertGroups:
    """A batch's pairs sorted by slot, then stably by expert; those in no group behind them.

    pairs: [tokens * top_k] int64. keys: beside them int64, `slot * experts + expert` or `NO_GROUP`,
    ascending. bounds: the most pairs, the most groups and the highest rank that a batch of this
    shape can have. slots: those with weights in this layer, on the host: what a loop may visit;
    kernels on a device ask the directory instead, because a captured graph meets other slots.

    What is made of the keys is made once, for all products of a layer.
    """

    pairs: Tensor
    keys: Tensor
    experts: int
    bounds: GroupBounds
    slots: tuple[int, ...]

    def at(self, places: Tensor) -> "ExpertGroups":
        """The same groups where pair `p` is row `places[p]` of a kernel's operands."""
        return replace(self, pairs=places[self.pairs])

    @cached_property
    def spans(self) -> tuple[ExpertSpan, ...]:
        """The pairs of each of `slots`, on the host; it waits for the device."""
        keys, counts = torch.unique_consecutive(self.keys, return_counts=True)
        groups = [
            (*divmod(key, self.experts), size)
            for key, size in zip(keys.tolist(), counts.tolist(), strict=True)
        ]
        spans, start = [], 0
        for slot, members in groupby(groups, key=itemgetter(0)):
            _, experts, sizes = map(list, zip(*members, strict=True))
            end = start + sum(sizes)
            spans.append(ExpertSpan(slot, start, end, experts, sizes))
            start = end
        return tuple(span for span in spans if span.slot in self.slots)

    def tiles(self, height: int) -> Tensor:
        """Where each tile starts in `pairs`, or their number behind the last: [bound] int64.

        A tile is at most `height` pairs of one group; its rows are those whose key is its first
        one's. The table's length follows from the bounds.
        """
        if height not in self._tiles:
            self._tiles[height] = self._cut(height)
        return self._tiles[height]

    @cached_property
    def _tiles(self) -> dict[int, Tensor]:
        return {}

    def _cut(self, height: int) -> Tensor:
        places = torch.arange(len(self.keys), device=self.keys.device)
        within = places - torch.searchsorted(self.keys, self.keys)
        starts = (within % height == 0) & (self.keys != NO_GROUP)
        numbers = torch.arange(1, self.bounds.tiles(height) + 1, device=places.device)
        return torch.searchsorted(starts.cumsum(0), numbers)


def group_experts(
    groups: Groups, has_weights: Callable[[int], bool], top_k_index: Tensor, experts: int
) -> ExpertGroups | None:
    """The groups of one layer's pairs; None where no row's slot `has_weights` there.

    top_k_index: [tokens, top_k], each an expert below `experts`, or `experts` for one that is not
    this rank's. On a CUDA device it is never None: a graph that was captured with slots without
    weights may be replayed with others.
    """
    slots = tuple(span.slot for span in groups.spans if has_weights(span.slot))
    if not slots and top_k_index.device.type != "cuda":
        return None
    keys = groups.token_slots[:, None] * experts + top_k_index
    is_grouped = (groups.token_slots >= 0)[:, None] & (top_k_index < experts)
    keys, pairs = torch.where(is_grouped, keys, NO_GROUP).flatten().sort(stable=True)
    most = min(len(pairs), groups.bounds.groups * experts)
    bounds = GroupBounds(len(pairs), most, groups.bounds.rank)
    return ExpertGroups(pairs, keys, experts, bounds, slots)


@dataclass(frozen=True, slots=True)
class Routed:
    """All pairs of a batch, sorted stably by expert: the order of the base model's products.

    tokens, experts: [pairs], of each row. places: [pairs], the row where each pair lies. ends:
    [experts] int32, where each expert's rows end; behind the last are rows of other ranks' experts.
    """

    tokens: Tensor
    experts: Tensor
    places: Tensor
    ends: Tensor


def sort_by_expert(top_k_index: Tensor, experts: int) -> Routed:
    """Sort a batch's pairs; top_k_index as in `group_experts`."""
    sorted_experts, order = top_k_index.reshape(-1).sort(stable=True)
    places = torch.empty_like(order)
    numbers = torch.arange(len(order), device=order.device)
    places[order] = numbers
    each = torch.arange(experts, device=order.device, dtype=sorted_experts.dtype)
    ends = torch.searchsorted(sorted_experts, each, right=True, out_int32=True)
    return Routed(order // top_k_index.shape[1], sorted_experts, places, ends)
