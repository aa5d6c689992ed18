"""The Punica wrapper: one batch's mapping of rows to slots, and the products over its groups.

An adapter id without a slot is an error; it never falls back to the base model. Generations are
checked by the engine before it builds a mapping.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.block_attention import BlockAttention
from loradock.engine.kernels.expert_groups import ExpertGroups, group_experts
from loradock.engine.kernels.interface import Kernels, LinearKernel, LinearPlan
from loradock.engine.kernels.operands import (
    GroupBounds,
    Groups,
    LoRASlices,
    RowOrder,
    accumulator_dtype,
)
from loradock.engine.layout import next_power_of_two
from loradock.engine.punica.grouping import Grouper
from loradock.engine.punica.mapping import BASE, LoRAMapping, slots_of
from loradock.engine.punica.side_stream import Concurrent


class ShrinkExpand(NamedTuple):
    """The slices of a product whose intermediate is exchanged between ranks.

    `shrink` provides A and `expand` provides B. This process shrinks to one `rank_parts`-th of each
    adapter's rank.
    """

    shrink: LoRASlices
    expand: LoRASlices
    rank_parts: int = 1


class LaunchKey(NamedTuple):
    """Everything that the launches over a mapping depend on; None if nothing is launched.

    `buffers`: identifies the tables on the device that the launches read. `is_fixed`: False if an
    adapter of the batch has saved layers, which are computed from its rows' own indices.
    """

    tokens: GroupBounds | None
    prompts: GroupBounds | None
    buffers: object
    is_fixed: bool = True


class _CalledLinear(NamedTuple):
    """The plan of an implementation that prepares nothing."""

    linear: LinearKernel
    slices: LoRASlices
    groups: Groups

    def run(self, y: Tensor, x: Tensor) -> None:
        """Call the operation."""
        self.linear(y, x, self.slices, self.groups)


class PunicaWrapper:
    """The current batch's metadata, shared by all wrapped layers of a model.

    `token_slots` [tokens] and `prompt_slots` [sampled rows] are int64 on the host, -1 for the base
    model; `groups` and `prompt_groups` are the groups of the two for kernels. `rank_max`: the
    highest rank that a slot can hold. Before the first mapping every row uses the base model.
    `specialize_active`: the size of launch grids follows the number of active adapters, rounded up
    to a power of two, instead of the number of slots. `concurrent`: computes a linear layer's delta
    concurrently with its base output; without it the delta is computed after.
    `has_saved_layers(slot)`: whether the adapter in a slot replaces layers whole. What a layer
    derives from the mapping is valid for one `batch`, an object that is replaced with the groups,
    and for one `only_slot`, the slot of all rows if one row runs alone. `has_derived`: whether a
    layer has used groups of other rows than these since its caller set it to False.
    """

    def __init__(
        self,
        device: torch.device,
        rank_max: int,
        kernels: Kernels,
        *,
        specialize_active: bool = False,
        concurrent: Concurrent | None = None,
        has_saved_layers: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.rank_max = rank_max
        self.grouper = Grouper(device, rank_max, specialize_active)
        self._kernels = kernels
        self._concurrent = concurrent
        self.is_concurrent = concurrent is not None
        self._has_saved_layers = has_saved_layers
        self._mapping: LoRAMapping | None = None
        self._layout: tuple[int | None, ...] = ()
        # Groups of layers that have neither a row per token nor one per sampled row.
        self._derived: dict[tuple[object, ...], Groups] = {}
        self.has_derived = False
        self.batch: object = object()
        self.only_slot: int | None = None
        self.token_slots: Tensor | None = None
        self.prompt_slots: Tensor | None = None
        self.groups: Groups | None = None
        self.prompt_groups: Groups | None = None
        # The slots of all rows of the mapping; None until they are needed.
        self._slots: frozenset[int] | None = None

    def update_metadata(self, mapping: LoRAMapping, lora_index_to_id: Sequence[int | None]) -> bool:
        """Replace adapter ids by slots and groups; return False if nothing has changed.

        `lora_index_to_id[slot]` is the adapter in that slot, None for an empty slot. Raises
        `NotResident` (L007) for an id without a slot, and ValueError if there are equally many
        sampled rows and tokens but their ids differ; then the metadata is unchanged.
        """
        layout = tuple(lora_index_to_id)
        if self._mapping is not None and layout == self._layout and mapping == self._mapping:
            return False
        slot_of_id = {BASE: -1}
        slot_of_id |= {id_: slot for slot, id_ in enumerate(layout) if id_ is not None}
        token_slots = slots_of(mapping.index_mapping, slot_of_id)
        prompt_slots = slots_of(mapping.prompt_mapping, slot_of_id)
        if len(token_slots) == len(prompt_slots) and not torch.equal(token_slots, prompt_slots):
            # A layer's input could be either of them, so each row must have one adapter.
            raise ValueError(
                f"index_mapping and prompt_mapping both have {len(token_slots)} rows and differ; "
                "a batch with one token per prompt must have one adapter per row"
            )
        self._group(token_slots, prompt_slots, len(layout))
        self._derived.clear()
        self.batch = object()
        self.token_slots, self.prompt_slots = token_slots, prompt_slots
        self._slots = None
        self._mapping, self._layout = mapping, layout
        return True

    def batches_to_compile(
        self, tokens_max: int, max_loras: int, *, has_experts: bool = False
    ) -> list[tuple[int, int]]:
        """Return the smallest batch, (rows, adapters), for each set of compiled kernels.

        Together they are all that batches of at most `tokens_max` rows need; none for kernels that
        aren't compiled. `has_experts`: the largest batch is the last, because kernels of experts
        are for pairs of rows and experts, and have no more than two sets: for few, and for many.
        """
        if self._kernels.variant_of is None:
            return []
        found: dict[object, tuple[int, int]] = {}
        sizes = [1 << power for power in range(next_power_of_two(tokens_max).bit_length())]
        for rows in sizes:
            # The bounds of more adapters than the last of these powers are those of all slots.
            counts = [*sizes[: max_loras.bit_length()], max_loras]
            for adapters in [count for count in counts if count <= min(rows, max_loras)]:
                bounds = self.grouper.bounds_of(rows, adapters, max_loras)
                found.setdefault(self._kernels.variant_of(bounds), (rows, adapters))
        largest = [(tokens_max, 1)] if has_experts else []
        return [*found.values(), *largest]

    def _group(self, token_slots: Tensor, prompt_slots: Tensor, max_loras: int) -> None:
        self.groups, self.prompt_groups = self.grouper.group(token_slots, prompt_slots, max_loras)

    @property
    def attention(self) -> BlockAttention | None:
        """The kernel that attends over blocks; None for PyTorch's functions."""
        return self._kernels.attention

    @property
    def launch_key(self) -> LaunchKey:
        """Everything that the launches over the current mapping depend on."""
        tokens, prompts = (
            groups.bounds if groups is not None and groups.spans else None
            for groups in (self.groups, self.prompt_groups)
        )
        return LaunchKey(tokens, prompts, self.grouper.buffer_identity, not self._has_saved())

    @property
    def active_slots(self) -> frozenset[int]:
        """The slots of the batch's adapters."""
        return self._distinct_slots() - {-1}

    def touches(self, slices: LoRASlices) -> bool:
        """Return whether an adapter of the batch has weights in these slices."""
        return any(pair is not None for slot in self.active_slots for pair in slices.pairs(slot))

    @contextmanager
    def only_row(self, row: int) -> Iterator[None]:
        """Use the adapter of one sampled row for all rows of every layer, within the context."""
        self.only_slot = -1 if self.prompt_slots is None else int(self.prompt_slots[row])
        try:
            yield
        finally:
            self.only_slot = None

    def _has_saved(self) -> bool:
        groups = self.groups if self.groups is not None and self.groups.spans else None
        spans = () if groups is None else groups.spans
        return any(self._has_saved_layers(slot) for slot, _, _ in spans)

    @property
    def adapted_tokens(self) -> int | None:
        """The tokens of the mapping; None if none has an adapter, or one row is run alone."""
        if self.only_slot is not None:
            return None
        return self.groups.tokens if self.groups is not None and self.groups.spans else None

    def add_lora_linear(self, y: Tensor, x: Tensor, slices: LoRASlices) -> None:
        """Add every row's delta to a linear layer's output, in place.

        y: [rows, sum of out_features]. x: [..., in_features], one row per row of `y`; `groups_of`
        specifies which. A batch without adapters costs nothing.
        """
        groups = self.groups_of(x.shape[:-1], slices)
        if groups is not None:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            self._kernels.linear(y, rows, slices, groups)

    def plan_linear(
        self, y: Tensor, x: Tensor, slices: LoRASlices, shape: Sequence[int]
    ) -> LinearPlan | None:
        """Return the plan of `add_lora_linear` for the current batch; None without adapters.

        y: [rows, sum of out_features]. x: [rows, in_features]. shape: the leading shape of the
        layer's input, as for `groups_of`.
        """
        groups = self.groups_of(shape, slices)
        if groups is None:
            return None
        plan = self._kernels.plan_linear
        if plan is None:
            return _CalledLinear(self._kernels.linear, slices, groups)
        return plan(y, x, slices, groups)

    def with_lora_linear(self, base: Callable[[], Tensor], x: Tensor, slices: LoRASlices) -> Tensor:
        """Return `base()`, a linear layer's output for `x`, with every row's delta added.

        base: returns [..., sum of out_features]; a model's own kind of linear layer may return a
        transposed view. x: [..., in_features]; `groups_of` specifies which rows. The delta is
        computed in float32 while `base` runs, and their sum is rounded once, as `add_lora_linear`
        rounds it. Raises RuntimeError for a wrapper without `concurrent`.
        """
        if self._concurrent is None:
            raise RuntimeError("the wrapper was made without `concurrent`; use add_lora_linear")
        groups = self.groups_of(x.shape[:-1], slices)
        if groups is None:
            return base().contiguous()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, delta = self._concurrent.run(
            lambda: base().contiguous(), lambda: self._delta(rows, slices, groups)
        )
        y.view(delta.shape).add_(delta)
        return y

    def _delta(self, x: Tensor, slices: LoRASlices, groups: Groups) -> Tensor:
        """Return every row's delta, 0 for the base model: [rows, sum of out_features]."""
        dtype = accumulator_dtype(x.dtype)
        shrunk = x.new_empty((len(slices.columns), len(x), self.rank_max), dtype=dtype)
        delta = x.new_zeros((len(x), sum(slices.out_features)), dtype=dtype)
        self._kernels.shrink(shrunk, x, slices, groups)
        self._kernels.expand(delta, shrunk, slices, groups)
        return delta

    def add_lora_shrink_expand(
        self, y: Tensor, x: Tensor, slices: ShrinkExpand, exchange: Callable[[Tensor], Tensor]
    ) -> None:
        """As `add_lora_linear`, with `exchange` between shrink and expand, in place.

        y: [rows, sum of out_features], this process's columns, possibly a view of more columns. x:
        [..., in_features], as for `groups_of`. `exchange` maps [slices, tokens, rank_max /
        rank_parts], in the accumulator's dtype and 0 where nothing was shrunk, to [slices, tokens,
        rank_max]. Whether it is called is the same on all ranks, so none waits for another.
        """
        groups = self.groups_of(x.shape[:-1], slices.expand)
        if groups is not None:
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            shrunk = self._shrink_buffer(rows, slices)
            self._kernels.shrink(shrunk, rows, slices.shrink, groups)
            self._kernels.expand(y, exchange(shrunk), slices.expand, groups)

    def _shrink_buffer(self, x: Tensor, slices: ShrinkExpand) -> Tensor:
        """Return the buffer for `slices.shrink` of `x`: zeros, because ranks may sum it."""
        shape = (len(slices.shrink.columns), len(x), self.rank_max // slices.rank_parts)
        return x.new_zeros(shape, dtype=accumulator_dtype(x.dtype))

    def add_lora_embedding(
        self, y: Tensor, token_ids: Tensor, slices: LoRASlices, scale: float
    ) -> None:
        """Add every row's delta, times `scale`, to a token embedding's output, in place.

        y: [tokens, hidden]. token_ids: [...] integers, one per token. Raises ValueError as
        `groups_of` does.
        """
        groups = self.groups_of(token_ids.shape, slices)
        if groups is not None:
            ids = token_ids.flatten().contiguous().long()
            self._kernels.embedding(y, ids, slices, groups, scale)

    def groups_of(
        self,
        shape: int | Sequence[int],
        slices: LoRASlices | None = None,
        row_order: RowOrder | None = None,
    ) -> Groups | None:
        """Return the groups of a layer's input by its leading shape; None if no row has an adapter.

        An input has a row per sampled row, a row per token, or any number of rows for each sampled
        row, which are then its leading dimension, as projections of cached states have. An input
        of another shape is the base model's if no adapter of the batch is in `slices`. Raises
        ValueError otherwise: the mapping is for another number of rows. `row_order`: of an input
        without `slices`.
        """
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        rows = math.prod(shape)
        order = slices.row_order if slices is not None else row_order or RowOrder.MAPPING
        if order is not RowOrder.MAPPING and self.only_slot is None:
            prompts = 0 if self.prompt_slots is None else len(self.prompt_slots)
            if order is RowOrder.COLUMNS and len(shape) > 1 and 0 < shape[1] == prompts:
                return self._column_groups(shape)
            return self._one_adapter_groups(rows, slices)
        if self.only_slot is not None:
            return self._groups_of_slot(self.only_slot, rows)
        is_sampled = self.prompt_groups is not None and self.prompt_groups.tokens == rows
        groups = self.prompt_groups if is_sampled else self.groups
        if groups is None or not groups.spans:
            return None
        return groups if rows == groups.tokens else self._derived_groups(shape, slices)

    def _column_groups(self, shape: Sequence[int]) -> Groups | None:
        """Return the groups of an input [tokens, rows, ...], as `groups_of`."""
        prompts = self.prompt_slots
        if prompts is None or self.prompt_groups is None or not self.prompt_groups.spans:
            return None
        repeats = math.prod(shape[2:])
        return self._derive(
            ("columns", *shape), lambda: prompts.repeat_interleave(repeats).repeat(shape[0])
        )

    def _one_adapter_groups(self, rows: int, slices: LoRASlices | None) -> Groups | None:
        """Return the groups of an input whose rows are in no known order, as `groups_of`.

        Raises ValueError unless all rows of the mapping have one adapter, or none of them is in
        `slices`.
        """
        slot = self._common_slot()
        if slot is not None:
            return self._groups_of_slot(slot, rows)
        if slices is not None and not self.touches(slices):
            return None
        raise ValueError(
            "the layer sees rows in an order of the model's own, so a batch can have one adapter "
            "with weights for it, and no other rows; run its rows in a separate batch"
        )

    def _derived_groups(self, shape: Sequence[int], slices: LoRASlices | None) -> Groups | None:
        rows, tokens = math.prod(shape), 0 if self.groups is None else self.groups.tokens
        prompts = self.prompt_slots
        if prompts is not None and len(shape) > 1 and 0 < len(prompts) == shape[0]:
            repeats = rows // shape[0]
            return self._derive((None, rows), lambda: prompts.repeat_interleave(repeats))
        if slices is not None and not self.touches(slices):
            return None
        raise ValueError(
            f"a batch of {rows} rows, but the mapping has {tokens}; "
            "update the mapping before every forward"
        )

    def _groups_of_slot(self, slot: int, rows: int) -> Groups | None:
        """Return the groups of `rows` rows that all use one slot; -1 is the base model."""
        if slot < 0:
            return None
        return self._derive((slot, rows), lambda: torch.full((rows,), slot, dtype=torch.int64))

    def _derive(self, key: tuple[object, ...], slots: Callable[[], Tensor]) -> Groups:
        self.has_derived = True
        if key not in self._derived:
            self._derived[key] = self.grouper.group_once(slots(), len(self._layout))
        return self._derived[key]

    def _common_slot(self) -> int | None:
        """Return the slot of all rows of the mapping; None if they differ."""
        distinct = self._distinct_slots()
        return next(iter(distinct)) if len(distinct) == 1 else None

    def _distinct_slots(self) -> frozenset[int]:
        """Return the slots of all rows of the mapping, -1 for rows without an adapter."""
        if self._slots is None:
            known = [one for one in (self.token_slots, self.prompt_slots) if one is not None]
            self._slots = frozenset(slot for one in known for slot in torch.unique(one).tolist())
        return self._slots

    def group_experts(
        self,
        tokens: int,
        adapter_enabled: Callable[[int], bool],
        top_k_index: Tensor,
        experts: int,
    ) -> ExpertGroups | None:
        """Return the groups of one layer's routing for `add_lora_fused_moe`; None without any work.

        `adapter_enabled(slot)`: whether a slot has weights in this layer; the other arguments are
        as in `group_experts` of `engine/kernels/expert_groups.py`. Raises ValueError as
        `groups_of` does.
        """
        groups = self.groups_of(tokens)
        if groups is None:
            return None
        return group_experts(groups, adapter_enabled, top_k_index, experts)

    def add_lora_fused_moe(
        self, ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
    ) -> None:
        """Add every pair's delta to its slices' outputs, in place.

        These are w1 and w3 (or both in one) before the activation, and w2 before the weighted sum.
        ys: one [pairs, out_features[s]] per slice, any strides. x: [pairs, in_features]. The pairs
        of `groups` are rows of both.
        """
        self._kernels.experts(ys, x, slices, groups)

    def add_lora_fused_moe_shrink_expand(
        self,
        ys: Sequence[Tensor],
        x: Tensor,
        slices: ShrinkExpand,
        groups: ExpertGroups,
        exchange: Callable[[Tensor], Tensor],
    ) -> None:
        """As `add_lora_fused_moe`, with `exchange` between shrink and expand, in place.

        `ys` are this process's columns. `exchange` is as in `add_lora_shrink_expand`, over the
        pairs in the groups' order instead of tokens.
        """
        shrunk = self._shrink_buffer(x, slices)
        self._kernels.experts_shrink(shrunk, x, slices.shrink, groups)
        self._kernels.experts_expand(ys, exchange(shrunk), slices.expand, groups)
