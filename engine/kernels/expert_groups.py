"""Grouping of an experts layer's rows by slot and expert.

The groups are built for every layer and batch, because each layer routes for itself. They are built
by tensor operations alone: nothing waits for the device, and no Python loop runs over tokens,
experts or pairs. Their sizes follow from the numbers of tokens and choices, so a captured graph can
be replayed for any routing.

A *pair* is a token and one of the experts that it is routed to: `t * top_k + k` for token `t`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.operands import GroupBounds, Groups

NO_GROUP: Final = 1 << 62
"""The key of pairs without an adapter on this rank: base rows, and experts of other ranks."""


class ExpertSpan(NamedTuple):
    """The pairs `groups.pairs[start:end]` of one slot; `sizes[i]` of them go to `experts[i]`."""

    slot: int
    start: int
    end: int
    experts: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class ExpertGroups:
    """A batch's pairs sorted by slot, then stably by expert, followed by those in no group.

    pairs: [tokens * top_k] int64. keys: [tokens * top_k] int64, ascending, each pair's
    `slot * experts + expert` or `NO_GROUP`. bounds: the most pairs, the most groups and the highest
    rank of any batch of this shape. slots: those with weights in this layer, on the host, for loops
    on the host. Kernels on a device read the directory instead, because a captured graph is
    replayed with other slots.

    What is derived from the keys is computed once for all products of a layer.
    """

    pairs: Tensor
    keys: Tensor
    experts: int
    bounds: GroupBounds
    slots: tuple[int, ...]

    def with_rows(self, row_of_pair: Tensor) -> "ExpertGroups":
        """Return the same groups where pair `p` is row `row_of_pair[p]` of a kernel's operands."""
        return replace(self, pairs=row_of_pair[self.pairs])

    @cached_property
    def spans(self) -> tuple[ExpertSpan, ...]:
        """The pairs of each of `slots`, on the host; waits for the device."""
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

    def tile_starts(self, block_m: int) -> Tensor:
        """Return the index into `pairs` at which each tile starts: [bound] int64.

        A tile is at most `block_m` pairs of one group: those whose key equals the key of its first
        pair. The length follows from the bounds; entries after the last tile are `len(pairs)`.
        """
        if block_m not in self._tile_starts:
            self._tile_starts[block_m] = self._find_tile_starts(block_m)
        return self._tile_starts[block_m]

    @cached_property
    def _tile_starts(self) -> dict[int, Tensor]:
        return {}

    def _find_tile_starts(self, block_m: int) -> Tensor:
        positions = torch.arange(len(self.keys), device=self.keys.device)
        within_group = positions - torch.searchsorted(self.keys, self.keys)
        is_start = (within_group % block_m == 0) & (self.keys != NO_GROUP)
        numbers = torch.arange(1, self.bounds.max_tiles(block_m) + 1, device=positions.device)
        return torch.searchsorted(is_start.cumsum(0), numbers)


def group_experts(
    groups: Groups, has_weights: Callable[[int], bool], top_k_index: Tensor, experts: int
) -> ExpertGroups | None:
    """Return the groups of one layer's pairs; None if no row's slot `has_weights` in it.

    top_k_index: [tokens, top_k], each an expert below `experts`, or `experts` for an expert of
    another rank. On a CUDA device the result is never None: a graph that was captured with slots
    without weights may be replayed with others.
    """
    slots = tuple(span.slot for span in groups.spans if has_weights(span.slot))
    if not slots and top_k_index.device.type != "cuda":
        return None
    keys = groups.token_slots[:, None] * experts + top_k_index
    is_grouped = (groups.token_slots >= 0)[:, None] & (top_k_index < experts)
    keys, pairs = torch.where(is_grouped, keys, NO_GROUP).flatten().sort(stable=True)
    groups_max = min(len(pairs), groups.bounds.groups * experts)
    bounds = GroupBounds(len(pairs), groups_max, groups.bounds.rank)
    return ExpertGroups(pairs, keys, experts, bounds, slots)


@dataclass(frozen=True, slots=True)
class RoutedPairs:
    """All pairs of a batch, sorted stably by expert: the row order of the base model's products.

    tokens, experts: [pairs], of each row. row_of_pair: [pairs], each pair's row. ends: [experts]
    int32, the end of each expert's rows; rows after the last end are for experts of other ranks.
    """

    tokens: Tensor
    experts: Tensor
    row_of_pair: Tensor
    ends: Tensor


def sort_by_expert(top_k_index: Tensor, experts: int) -> RoutedPairs:
    """Sort a batch's pairs by expert; top_k_index as in `group_experts`."""
    sorted_experts, order = top_k_index.reshape(-1).sort(stable=True)
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(experts, device=order.device, dtype=sorted_experts.dtype)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    return RoutedPairs(order // top_k_index.shape[1], sorted_experts, row_of_pair, ends)
