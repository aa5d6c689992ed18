"""Wrapped layers, one family a file, and the one table from base layer to wrapper.

What it is: the base model's layers with adapters added. What it is not: preparation of a whole
model, which is `engine.preparation`'s. One rule: a layer is chosen by its role, its type and the
wrapper's own `can_replace_layer`, never by a class's name.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.layers.base import BaseLayerWithLoRA, SliceShape
from engine.layers.classifier import ClassificationHeadWithLoRA
from engine.layers.column import (
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
)
from engine.layers.embedding import VocabParallelEmbeddingWithLoRA
from engine.layers.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from engine.layers.fully_sharded_experts import FusedMoE3DWithShardedLoRA, FusedMoEWithShardedLoRA
from engine.layers.logits import LogitsProcessorWithLoRA
from engine.layers.merged import (
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
)
from engine.layers.packed import MergedColumnParallelLinear, QKVParallelLinear
from engine.layers.qkv import (
    MergedQKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA,
    QKVParallelLinearWithShardedLoRA,
)
from engine.layers.replicated import ReplicatedLinearWithLoRA
from engine.layers.router import RouterWithLoRA
from engine.layers.row import RowParallelLinearWithLoRA, RowParallelLinearWithShardedLoRA
from engine.layers.tensor_parallel import (
    ColumnParallelLinear,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "FULLY_SHARDED",
    "MIXED_WRAPPERS",
    "WRAPPERS",
    "BaseLayerWithLoRA",
    "ClassificationHeadWithLoRA",
    "ColumnParallelLinear",
    "ColumnParallelLinearWithLoRA",
    "ColumnParallelLinearWithShardedLoRA",
    "FusedMoE3DWithLoRA",
    "FusedMoE3DWithShardedLoRA",
    "FusedMoEWithLoRA",
    "FusedMoEWithShardedLoRA",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinear",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "ParallelHead",
    "QKVParallelLinear",
    "QKVParallelLinearWithLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "ReplicatedLinearWithLoRA",
    "Role",
    "RouterWithLoRA",
    "Row",
    "RowParallelLinear",
    "RowParallelLinearWithLoRA",
    "RowParallelLinearWithShardedLoRA",
    "SliceShape",
    "VocabParallelEmbedding",
    "VocabParallelEmbeddingWithLoRA",
    "wrapper_of",
    "wrappers_for",
]


class Role(Enum):
    """What a layer is to its model, where its type does not say it."""

    BODY = "body"
    HEAD = "language-model head"
    CLASSIFIER = "classification head"


class Row(NamedTuple):
    """Layers of this role and type are wrapped by `wrapper`, if it agrees."""

    role: Role
    base_type: type[nn.Module]
    wrapper: type[BaseLayerWithLoRA]


WRAPPERS: Final = (
    Row(Role.BODY, QKVParallelLinear, MergedQKVParallelLinearWithLoRA),
    Row(Role.BODY, QKVParallelLinear, QKVParallelLinearWithLoRA),
    Row(Role.BODY, MergedColumnParallelLinear, MergedColumnParallelLinearWithLoRA),
    Row(Role.BODY, MergedColumnParallelLinear, MergedColumnParallelLinearVariableSliceWithLoRA),
    Row(Role.BODY, ColumnParallelLinear, ColumnParallelLinearWithLoRA),
    Row(Role.BODY, RowParallelLinear, RowParallelLinearWithLoRA),
    Row(Role.BODY, nn.Linear, ReplicatedLinearWithLoRA),
    Row(Role.BODY, Conv1D, ReplicatedLinearWithLoRA),
    Row(Role.BODY, nn.Embedding, VocabParallelEmbeddingWithLoRA),
    Row(Role.HEAD, nn.Linear, LogitsProcessorWithLoRA),
    Row(Role.CLASSIFIER, nn.Linear, ClassificationHeadWithLoRA),
    Row(Role.BODY, nn.Module, FusedMoE3DWithLoRA),
    Row(Role.BODY, nn.Module, FusedMoEWithLoRA),
    Row(Role.BODY, nn.Module, RouterWithLoRA),
)
"""In order of preference: the first row that fits a layer wraps it."""

MIXED_WRAPPERS: Final = tuple(row for row in WRAPPERS if row.wrapper is not FusedMoE3DWithLoRA)
"""The table for both formats of expert adapters side by side: the 3-D ones are split at load."""

FULLY_SHARDED: Final[Mapping[type[BaseLayerWithLoRA], type[BaseLayerWithLoRA]]] = {
    ColumnParallelLinearWithLoRA: ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithLoRA: MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA: MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA: QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithLoRA: RowParallelLinearWithShardedLoRA,
    FusedMoEWithLoRA: FusedMoEWithShardedLoRA,
    FusedMoE3DWithLoRA: FusedMoE3DWithShardedLoRA,
}
"""What wraps in their place with fully sharded adapters; every other class is the same there."""


def wrappers_for(mixed_experts: bool, fully_sharded: bool) -> tuple[Row, ...]:
    """The table for these two fields of `LoRAConfig`."""
    table = MIXED_WRAPPERS if mixed_experts else WRAPPERS
    if not fully_sharded:
        return table
    return tuple(row._replace(wrapper=FULLY_SHARDED.get(row.wrapper, row.wrapper)) for row in table)


def wrapper_of(
    layer: nn.Module, role: Role = Role.BODY, table: Sequence[Row] = WRAPPERS
) -> type[BaseLayerWithLoRA] | None:
    """The class that wraps `layer`; None where it stays as it is."""
    for row in table:
        fits = row.role is role and isinstance(layer, row.base_type)
        if fits and row.wrapper.can_replace_layer(layer):
            return row.wrapper
    return None
