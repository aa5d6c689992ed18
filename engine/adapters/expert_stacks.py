"""Experts' weights as the directory has them: one stack a column, from either format.

What it is: which part of each tensor this process reads, and how what was read is stacked or
split. What it is not: a check; names and shapes were held against the model before. One rule: a
process reads nothing of other ranks' experts, except where a file has all experts side by side in
one row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.adapters.expert_tensors import ExpertPair
from engine.adapters.pairs import Pair
from engine.layout import ModuleShape
from engine.submatrix import Part


@dataclass(frozen=True)
class MoEEPLoadSpec:
    """Which of a layer's experts this rank keeps; no others are read.

    Raises ValueError where `local_experts` are not among `num_experts`.
    """

    num_experts: int
    local_experts: range

    def __post_init__(self) -> None:
        local = self.local_experts
        if local.step != 1 or not 0 <= local.start < local.stop <= self.num_experts:
            raise ValueError(f"local_experts is {local}; a range within {self.num_experts} experts")

    def a_part(self, rank: int) -> Part:
        """What to read of an A that lies expert by expert, `[experts * rank, in]`."""
        local = self.local_experts
        return Part((range(local.start * rank, local.stop * rank),))


def expert_parts(pairs: Iterable[ExpertPair]) -> dict[str, Part]:
    """What this process keeps of each tensor; nothing of a pair whose expert is another rank's."""
    parts: dict[str, Part] = {}
    for pair, columns, expert in pairs:
        shard = columns[0].shard
        if expert is None:
            part = shard.a_part(pair.rank * columns[0].experts)
            if shard.experts is not None:
                part = MoEEPLoadSpec(columns[0].experts, shard.experts).a_part(pair.rank)
            stored = (part, Part(_fused_rows(columns)))
        elif expert in columns[0].kept_experts:
            stored = (shard.a_part(pair.rank), shard.b_part())
        else:
            continue
        parts |= zip(pair.factors(), stored, strict=True)
    return parts


def _fused_rows(columns: Sequence[ModuleShape]) -> tuple[range, ...] | None:
    """The rows of a fused B that fill these columns, one column after the other; None for all."""
    if columns[0].within is None:
        return columns[0].shard.b_rows
    rows: list[range] = []
    for column in columns:
        own = (range(column.out_features),) if column.within is None else (column.within.rows,)
        wanted = column.shard.b_rows
        rows += own if wanted is None else [own[0][part.start : part.stop] for part in wanted]
    return tuple(rows)


class Stack(NamedTuple):
    """One column's weights: A `[experts, rank, in]` and B `[experts, out, rank]`.

    `pair` tells what multiplies them.
    """

    column: ModuleShape
    pair: Pair
    a: Tensor
    b: Tensor


def expert_stacks(pairs: Iterable[ExpertPair], tensors: Mapping[str, Tensor]) -> list[Stack]:
    """The weights of every column that is touched; `tensors` are what `expert_parts` says."""
    pairs = list(pairs)
    stacks = [stack for pair in pairs if pair.expert is None for stack in _split(pair, tensors)]
    singles = sorted((pair for pair in pairs if pair.expert is not None), key=_column_name)
    for _, members in groupby(singles, key=_column_name):
        stacks.append(_stacked(list(members), tensors))
    return stacks


def _column_name(pair: ExpertPair) -> str:
    return pair.columns[0].name


def _split(fused: ExpertPair, tensors: Mapping[str, Tensor]) -> list[Stack]:
    """A fused pair, cut by expert and by column; columns share A."""
    pair, columns, _ = fused
    kept, rank = columns[0].kept_experts, pair.rank
    stored_a, stored_b = (tensors[name] for name in pair.factors())
    a = stored_a.reshape(len(kept), -1, stored_a.shape[1])
    all_b = stored_b.reshape(len(stored_b), rank, columns[0].experts)
    b = all_b[:, :, kept.start : kept.stop].permute(2, 0, 1)
    heights = [column.shard.b_height(column.out_features) for column in columns]
    parts = torch.split(b, heights, dim=1)
    return [
        Stack(column, pair, a, part.contiguous())
        for column, part in zip(columns, parts, strict=True)
    ]


def _stacked(members: Sequence[ExpertPair], tensors: Mapping[str, Tensor]) -> Stack:
    """One projection's experts in one stack; zeros for experts that the adapter leaves alone."""
    first, column = members[0].pair, members[0].columns[0]
    own = {
        pair.expert: [tensors[name] for name in pair.pair.factors()]
        for pair in members
        if pair.expert in column.kept_experts
    }
    dtype = next((a.dtype for a, _ in own.values()), torch.float32)
    shapes = (column.a_shape(first.rank)[1:], column.b_shape(first.rank)[1:])
    nothing = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    pairs = [own.get(expert, nothing) for expert in column.kept_experts]
    a, b = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    return Stack(column, first, a, b)
