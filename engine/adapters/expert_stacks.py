"""Experts' weights as one stack per directory column, from either format of a file.

Names and shapes have been checked against the model before. A process reads no weights of other
ranks' experts, except where each row of a stored matrix holds all experts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.adapters.expert_tensors import ExpertPair
from loradock.engine.adapters.pairs import TensorPair
from loradock.engine.layout import ModuleShape
from loradock.engine.submatrix import Submatrix


@dataclass(frozen=True)
class MoEEPLoadSpec:
    """The experts that a rank keeps of every layer; no others are read.

    Each rank keeps `local_num_experts` adjacent ones of `global_num_experts`. Raises ValueError
    for a rank whose experts are not among them.
    """

    ep_rank: int
    local_num_experts: int
    global_num_experts: int

    def __post_init__(self) -> None:
        local = self.local_experts
        if self.ep_rank < 0 or not local or local.stop > self.global_num_experts:
            raise ValueError(
                f"rank {self.ep_rank} has {self.local_num_experts} local experts, {local}; they "
                f"must be within {self.global_num_experts} experts"
            )

    @property
    def local_experts(self) -> range:
        """The rank's experts."""
        start = self.ep_rank * self.local_num_experts
        return range(start, start + self.local_num_experts)

    def is_remote(self, name: str) -> bool:
        """Whether a tensor belongs to a single expert that the rank does not keep."""
        match = _SINGLE_EXPERT.search(name)
        return match is not None and int(match[1]) not in self.local_experts


_SINGLE_EXPERT: Final = re.compile(r"\.experts\.(\d{1,6})\.")


def expert_submatrices(pairs: Iterable[ExpertPair]) -> dict[str, Submatrix]:
    """Return the part of each tensor that this process keeps; none of other ranks' experts."""
    parts: dict[str, Submatrix] = {}
    for pair, columns, expert in pairs:
        shard = columns[0].shard
        if expert is None:
            part = shard.a_submatrix(pair.rank * columns[0].experts)
            if shard.experts is not None:
                # A is stored expert by expert: [experts * rank, in].
                rows = range(shard.experts.start * pair.rank, shard.experts.stop * pair.rank)
                part = Submatrix((rows,))
            stored = (part, Submatrix(_fused_rows(columns)))
        elif expert in columns[0].kept_experts:
            stored = (shard.a_submatrix(pair.rank), shard.b_submatrix())
        else:
            continue
        parts |= zip(pair.factors(), stored, strict=True)
    return parts


def _fused_rows(columns: Sequence[ModuleShape]) -> tuple[range, ...] | None:
    """Return the rows of a fused B that fill these columns, in order of columns; None for all."""
    if columns[0].parameter_rows is None:
        return columns[0].shard.b_rows
    rows: list[range] = []
    for column in columns:
        within = column.parameter_rows
        all_rows = range(column.out_features) if within is None else within.rows
        wanted = column.shard.b_rows
        rows += [all_rows] if wanted is None else [all_rows[p.start : p.stop] for p in wanted]
    return tuple(rows)


class ExpertStack(NamedTuple):
    """One column's weights: A `[experts, rank, in]` and B `[experts, out, rank]`.

    `pair` has their rank, alpha and scaling.
    """

    column: ModuleShape
    pair: TensorPair
    a: Tensor
    b: Tensor


def expert_stacks(pairs: Iterable[ExpertPair], tensors: Mapping[str, Tensor]) -> list[ExpertStack]:
    """Return the weights of every touched column; `tensors` are the `expert_submatrices`."""
    pairs = list(pairs)
    stacks = [stack for pair in pairs if pair.expert is None for stack in _split(pair, tensors)]
    singles = sorted((pair for pair in pairs if pair.expert is not None), key=_column_name)
    for _, members in groupby(singles, key=_column_name):
        stacks.append(_stacked(list(members), tensors))
    return stacks


def _column_name(pair: ExpertPair) -> str:
    return pair.columns[0].name


def _split(fused: ExpertPair, tensors: Mapping[str, Tensor]) -> list[ExpertStack]:
    """Split a fused pair by expert and by column; columns share A."""
    pair, columns, _ = fused
    kept, rank = columns[0].kept_experts, pair.rank
    stored_a, stored_b = (tensors[name] for name in pair.factors())
    a = stored_a.reshape(len(kept), -1, stored_a.shape[1])
    all_b = stored_b.reshape(len(stored_b), rank, columns[0].experts)
    b = all_b[:, :, kept.start : kept.stop].permute(2, 0, 1)
    heights = [column.shard.b_height(column.out_features) for column in columns]
    parts = torch.split(b, heights, dim=1)
    return [
        ExpertStack(column, pair, a, part.contiguous())
        for column, part in zip(columns, parts, strict=True)
    ]


def _stacked(members: Sequence[ExpertPair], tensors: Mapping[str, Tensor]) -> ExpertStack:
    """Stack one projection's experts; zeros for experts that the adapter does not touch."""
    first, column = members[0].pair, members[0].columns[0]
    factors = {
        pair.expert: [tensors[name] for name in pair.pair.factors()]
        for pair in members
        if pair.expert in column.kept_experts
    }
    dtype = next((a.dtype for a, _ in factors.values()), torch.float32)
    shapes = (column.a_shape(first.rank)[1:], column.b_shape(first.rank)[1:])
    zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    pairs = [factors.get(expert, zeros) for expert in column.kept_experts]
    a, b = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    return ExpertStack(column, first, a, b)
