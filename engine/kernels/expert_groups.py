"""Which rows of an experts layer belong to which slot and expert.

What it is: the grouping that expert kernels read, made anew for every layer and batch, because each
layer routes for itself. What it is not: a decision who is routed where. One rule: tensor operations
alone; nothing waits for the device, and nothing loops over tokens, experts or pairs.

A *pair* is a token and one of the experts that it was routed to: `t * top_k + k` for token `t`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.operands import Groups, Span


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs whose token has an adapter, sorted by slot, then stably by expert.

    pairs: [n] int64. spans: a slot and where in `pairs` its own start and end, on the host. ends:
    [spans, experts] int32, where each expert's pairs end, counted from the span's start; behind the
    last are pairs of experts that this rank does not have.
    """

    pairs: Tensor
    spans: tuple[Span, ...]
    ends: Tensor

    def at(self, places: Tensor) -> "ExpertGroups":
        """The same groups where pair `p` is row `places[p]` of a kernel's operands."""
        return ExpertGroups(places[self.pairs], self.spans, self.ends)


def group_experts(
    groups: Groups, has_weights: Callable[[int], bool], top_k_index: Tensor, experts: int
) -> ExpertGroups | None:
    """The groups of one layer's pairs; None where no row's slot `has_weights` there.

    top_k_index: [tokens, top_k], each an expert below `experts`, or `experts` for one that is not
    this rank's.
    """
    kept = [span for span in groups.spans if has_weights(span.slot)]
    if not kept:
        return None
    top_k, device = top_k_index.shape[1], top_k_index.device
    tokens = torch.cat([groups.rows[span.start : span.end] for span in kept])
    pairs = (tokens[:, None] * top_k + torch.arange(top_k, device=device)).reshape(-1)
    sizes = [(span.end - span.start) * top_k for span in kept]
    spans = tuple(
        Span(span.slot, sum(sizes[:at]), sum(sizes[: at + 1])) for at, span in enumerate(kept)
    )
    return _sorted(pairs, spans, top_k_index.reshape(-1)[pairs], experts)


def _sorted(
    pairs: Tensor, spans: tuple[Span, ...], experts_of: Tensor, experts: int
) -> ExpertGroups:
    """Sort pairs, which are in the spans' order, by expert within each span."""
    device = pairs.device
    firsts = torch.tensor([span.start for span in spans]).to(device, non_blocking=True)
    # The number of the span that a place lies in.
    span_of = torch.searchsorted(firsts, torch.arange(len(pairs), device=device), right=True) - 1
    keys, order = (span_of * (experts + 1) + experts_of).sort(stable=True)
    numbers = torch.arange(len(spans), device=device)[:, None] * (experts + 1)
    last_keys = numbers + torch.arange(experts, device=device)
    ends = torch.searchsorted(keys, last_keys, right=True) - firsts[:, None]
    return ExpertGroups(pairs[order], spans, ends.to(torch.int32))


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
