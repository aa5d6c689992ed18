"""Which rows of an experts layer belong to which slot and expert.

What it is: the grouping that expert kernels read, made anew for every layer and batch, because each
layer routes for itself. What it is not: a decision who is routed where. One rule: tensor operations
alone; nothing waits for the device, and nothing loops over tokens, experts or pairs.

A *pair* is a token and one of the experts that it was routed to: `t * top_k + k` for token `t`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from engine.kernels.operands import GroupBounds, Groups

NO_GROUP: Final = 1 << 62
"""The key of pairs that no adapter of this rank touches: of base rows, and of others' experts."""


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A batch's pairs sorted by slot, then stably by expert; those in no group behind them.

    pairs: [tokens * top_k] int64. keys: beside them int64, `slot * experts + expert` or `NO_GROUP`,
    ascending. bounds: the most pairs, the most groups and the highest rank that a batch of this
    shape can have. slots: those with weights in this layer, on the host: what a loop may visit;
    kernels on a device ask the directory instead, because a captured graph meets other slots.
    """

    pairs: Tensor
    keys: Tensor
    experts: int
    bounds: GroupBounds
    slots: tuple[int, ...]

    def at(self, places: Tensor) -> "ExpertGroups":
        """The same groups where pair `p` is row `places[p]` of a kernel's operands."""
        return replace(self, pairs=places[self.pairs])

    def host_bounds(self) -> list[list[int]]:
        """For each of `slots` where its experts' pairs start, and behind them the last one's end.

        It waits for the device.
        """
        device = self.keys.device
        firsts = torch.tensor(self.slots, dtype=torch.int64, device=device)[:, None] * self.experts
        wanted = firsts + torch.arange(self.experts + 1, device=device)
        bounds: list[list[int]] = torch.searchsorted(self.keys, wanted).tolist()
        return bounds

    def tiles(self, height: int) -> Tensor:
        """Where each tile starts in `pairs`, or their number behind the last: [bound] int64.

        A tile is at most `height` pairs of one group; its rows are those whose key is its first
        one's. The table's length follows from the bounds.
        """
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
