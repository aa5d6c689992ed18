"""One batch's LoRA arithmetic: which row uses which slot, and the products over the groups.

What it is: the metadata of a batch and a thin way to the kernels. What it is not: a cache of
weights or a judge of generations (the engine checks those before it builds a mapping). One rule:
an adapter id without a slot is an error, never the base model.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import NotResident
from engine.kernels import Kernels
from engine.kernels.expert_groups import ExpertGroups, group_experts
from engine.kernels.operands import GroupBounds, Groups, LoRASlices, accumulator_dtype
from engine.punica.grouping import Grouper
from engine.punica.mapping import BASE, LoRAMapping
from engine.punica.side_stream import Beside


class Halves(NamedTuple):
    """A layer's product in two halves, for ranks that exchange what lies between them.

    `shrink` and `expand` give A and B. This process shrinks to one `rank_parts`-th of each rank.
    """

    shrink: LoRASlices
    expand: LoRASlices
    rank_parts: int = 1


class LaunchKey(NamedTuple):
    """What the launches over a mapping depend on; None where nothing is launched.

    `place` stands for the tables on the device that they read.
    """

    tokens: GroupBounds | None
    prompts: GroupBounds | None
    place: object


class PunicaWrapper:
    """The current batch's metadata, shared by all wrapped layers of a model.

    `token_slots` [tokens] and `prompt_slots` [sampled rows] are int64 on the host, -1 for the base
    model; `groups` and `prompt_groups` are what kernels read of the two. `rank_max`: the widest
    rank that a slot may hold, and so the width of a buffer for `add_shrink`. Before the first
    mapping every row is the base model's. `specialize_active`: grids follow the number of active
    adapters, rounded up to a power of two, instead of the number of slots. `beside`: where a linear
    layer's delta is made while its base output is; None makes it after.
    """

    def __init__(
        self,
        device: torch.device,
        rank_max: int,
        kernels: Kernels,
        *,
        specialize_active: bool = False,
        beside: Beside | None = None,
    ) -> None:
        self.rank_max = rank_max
        self.grouper = Grouper(device, rank_max, specialize_active)
        self._kernels = kernels
        self._beside = beside
        self._mapping: LoRAMapping | None = None
        self._layout: tuple[int | None, ...] = ()
        self.token_slots: Tensor | None = None
        self.prompt_slots: Tensor | None = None
        self.groups: Groups | None = None
        self.prompt_groups: Groups | None = None

    def update_metadata(self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None]) -> bool:
        """Turn adapter ids into slots and groups; False where nothing has changed.

        `lora_index_to_id[slot]` is the adapter in that slot, None where it is empty. Raises
        `NotResident` (L007) for an id without a slot, and ValueError for a mapping with as many
        sampled rows as tokens that are not the same; then the metadata stays what it was.
        """
        layout = tuple(lora_index_to_id)
        if self._mapping is not None and layout == self._layout and mapping == self._mapping:
            return False
        slot_of_id = {BASE: -1}
        slot_of_id |= {id_: slot for slot, id_ in enumerate(layout) if id_ is not None}
        token_slots = _slots_of(mapping.index_mapping, slot_of_id)
        prompt_slots = _slots_of(mapping.prompt_mapping, slot_of_id)
        if len(token_slots) == len(prompt_slots) and not torch.equal(token_slots, prompt_slots):
            # A layer's input would be either, and each row has one adapter.
            raise ValueError(
                f"index_mapping and prompt_mapping both have {len(token_slots)} rows and differ; "
                "a batch of one token a prompt has one adapter a row"
            )
        self._group(token_slots, prompt_slots, len(layout))
        self.token_slots, self.prompt_slots = token_slots, prompt_slots
        self._mapping, self._layout = mapping, layout
        return True

    def _group(self, token_slots: Tensor, prompt_slots: Tensor, slots_max: int) -> None:
        self.groups, self.prompt_groups = self.grouper.group(token_slots, prompt_slots, slots_max)

    @property
    def launch_key(self) -> LaunchKey:
        """What the launches over the current mapping depend on."""
        tokens, prompts = (
            groups.bounds if groups is not None and groups.spans else None
            for groups in (self.groups, self.prompt_groups)
        )
        return LaunchKey(tokens, prompts, self.grouper.place)

    def add_shrink(self, y: Tensor, x: Tensor, weights: LoRASlices, scale: float = 1.0) -> None:
        """`y[s, t] = scale * x[t] @ A[s][slot(t)].T`; see `kernels.shrink` for what stays."""
        groups = self.groups_of(len(x))
        if groups is not None:
            self._kernels.shrink(y, x, weights, groups, scale)

    def add_expand(
        self,
        y: Tensor,
        x: Tensor,
        weights: LoRASlices,
        offset: int = 0,
        add_inputs: bool = True,
    ) -> None:
        """`y[t, offset + o_s :][:out_s] += x[s, t] @ B[s][slot(t)].T`; see `kernels.expand`."""
        groups = self.groups_of(x.shape[1])
        if groups is not None:
            self._kernels.expand(y, x, weights, groups, offset, add_inputs)

    def add_lora_linear(
        self, y: Tensor, x: Tensor, weights: LoRASlices, scale: float = 1.0
    ) -> None:
        """Add every row's delta to a linear layer's output, in place; scale 1 is no scaling.

        y: [rows, sum of out_features]. x: [rows, in_features]; for rows as `groups_of` says. A
        batch without adapters costs nothing.
        """
        groups = self.groups_of(len(x))
        if groups is not None:
            self._kernels.linear(y, x, weights, groups, scale)

    def with_lora_linear(
        self, base: Callable[[], Tensor], x: Tensor, weights: LoRASlices
    ) -> Tensor:
        """`base()`, which a linear layer makes of `x`, with every row's delta added.

        base: gives [..., sum of out_features], contiguous. x: [rows, in_features]; for rows as
        `groups_of` says. With `beside` the delta is made in float32 while `base` runs, and their
        sum is rounded once, as without.
        """
        groups = None if self._beside is None else self.groups_of(len(x))
        if self._beside is None or groups is None:
            y = base()
            self.add_lora_linear(y.view(-1, y.shape[-1]), x, weights)
            return y
        y, delta = self._beside.run(base, lambda: self._delta(x, weights, groups))
        y.view(delta.shape).add_(delta)
        return y

    def _delta(self, x: Tensor, weights: LoRASlices, groups: Groups) -> Tensor:
        """Every row's delta, 0 for the base model: [rows, sum of out_features]."""
        dtype = accumulator_dtype(x.dtype)
        shrunk = x.new_empty((len(weights.columns), len(x), self.rank_max), dtype=dtype)
        delta = x.new_zeros((len(x), sum(weights.out_features)), dtype=dtype)
        self._kernels.shrink(shrunk, x, weights, groups, 1.0)
        self._kernels.expand(delta, shrunk, weights, groups, 0, False)
        return delta

    def add_lora_halves(
        self, y: Tensor, x: Tensor, halves: Halves, exchange: Callable[[Tensor], Tensor]
    ) -> None:
        """As `add_lora_linear`, with `exchange` between shrink and expand, in place.

        y: [rows, sum of out_features], this process's own columns: a view where there are others.
        `exchange` takes [slices, tokens, rank_max / rank_parts], in the accumulator's dtype and 0
        where nothing was shrunk, and gives [slices, tokens, rank_max].
        """
        if self.groups_of(len(x)) is not None:
            shrunk = self._between(x, halves)
            self.add_shrink(shrunk, x, halves.shrink)
            self.add_expand(y, exchange(shrunk), halves.expand)

    def _between(self, x: Tensor, halves: Halves) -> Tensor:
        """What `halves.shrink` of `x` goes into: zeros, because ranks may sum it."""
        shape = (len(halves.shrink.columns), len(x), self.rank_max // halves.rank_parts)
        return x.new_zeros(shape, dtype=accumulator_dtype(x.dtype))

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, weights: LoRASlices, scale: float = 1.0
    ) -> None:
        """Add every row's delta to a token embedding's output, in place.

        y: [tokens, hidden]. token_ids: [tokens] int64. Raises ValueError as `add_lora_linear`.
        """
        groups = self.groups_of(len(token_ids))
        if groups is not None:
            self._kernels.embedding(y, token_ids, weights, groups, scale)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, weights: LoRASlices, scale: float = 1.0
    ) -> None:
        """Add every row's delta to the logits, in place; for rows as `groups_of` says.

        y: [rows, vocabulary]. x: [rows, hidden].
        """
        groups = self.groups_of(len(x))
        if groups is not None:
            self._kernels.linear(y, x, weights, groups, scale)

    def groups_of(self, rows: int) -> Groups | None:
        """The groups of a layer's input: the sampled rows' if it has as many, else the tokens'.

        Where both are as many they are the same, as `update_metadata` makes sure. None where no row
        has an adapter. Raises ValueError where the mapping is another batch's.
        """
        sampled = self.prompt_groups is not None and self.prompt_groups.tokens == rows
        groups = self.prompt_groups if sampled else self.groups
        if groups is None or not groups.spans:
            return None
        if rows != groups.tokens:
            raise ValueError(
                f"a batch of {rows} rows meets a mapping of {groups.tokens}; "
                "update the mapping before every forward"
            )
        return groups

    def group_experts(
        self,
        tokens: int,
        adapter_enabled: Callable[[int], bool],
        top_k_index: Tensor,
        experts: int,
    ) -> ExpertGroups | None:
        """What `add_lora_fused_moe` needs of one layer's routing; None where it has nothing to do.

        `adapter_enabled(slot)` says whether a slot has weights in this layer; the other arguments
        are as in `kernels.expert_groups`. Raises ValueError as `add_lora_linear`.
        """
        groups = self.groups_of(tokens)
        if groups is None:
            return None
        return group_experts(groups, adapter_enabled, top_k_index, experts)

    def add_lora_fused_moe(
        self, ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups
    ) -> None:
        """Add every pair's delta to its slices' outputs, in place: before the activation w1 and w3
        (or both in one), before the weighted sum w2.

        ys: one [pairs, out_features[s]] a slice, any strides. x: [pairs, in_features]. `groups`
        are places in both.
        """
        self._kernels.experts(ys, x, weights, groups)

    def add_lora_fused_moe_halves(
        self,
        ys: Sequence[Tensor],
        x: Tensor,
        halves: Halves,
        groups: ExpertGroups,
        exchange: Callable[[Tensor], Tensor],
    ) -> None:
        """As `add_lora_fused_moe`, with `exchange` between shrink and expand, in place.

        `ys` are this process's own columns, and `exchange` is as in `add_lora_halves`, over the
        pairs in the groups' order instead of tokens.
        """
        shrunk = self._between(x, halves)
        self._kernels.experts_shrink(shrunk, x, halves.shrink, groups)
        self._kernels.experts_expand(ys, exchange(shrunk), halves.expand, groups)


def _slots_of(ids: Tensor, slot_of_id: dict[int, int]) -> Tensor:
    """The slot of every id; a Python loop over distinct ids only."""
    distinct, places = torch.unique(ids, return_inverse=True)
    wanted = distinct.tolist()
    unknown = [id_ for id_ in wanted if id_ not in slot_of_id]
    if unknown:
        raise NotResident(
            f"the mapping names adapters {unknown} that are in no slot; "
            f"in slots are {sorted(slot_of_id.keys() - {BASE})}; activate them first"
        )
    return torch.tensor([slot_of_id[id_] for id_ in wanted], dtype=torch.int64)[places]
