"""Wrapped layers, and the table from base layer to wrapper.

A wrapper is chosen by the layer's role, its type and the wrapper's own `can_replace_layer`, never
by a class name.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from torch import nn

from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape
from loradock.engine.layers.classifier import ClassificationHeadWithLoRA
from loradock.engine.layers.column import (
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
)
from loradock.engine.layers.convolution import CONVOLUTIONS, ConvolutionWithLoRA
from loradock.engine.layers.embedding import VocabParallelEmbeddingWithLoRA
from loradock.engine.layers.experts import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from loradock.engine.layers.fully_sharded_experts import (
    FusedMoE3DWithShardedLoRA,
    FusedMoEWithShardedLoRA,
)
from loradock.engine.layers.logits import LogitsProcessorWithLoRA
from loradock.engine.layers.merged import (
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
)
from loradock.engine.layers.missing import PPMissingLayer
from loradock.engine.layers.packed import MergedColumnParallelLinear, QKVParallelLinear
from loradock.engine.layers.qkv import (
    MergedQKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA,
    QKVParallelLinearWithShardedLoRA,
)
from loradock.engine.layers.replicated import ReplicatedLinearWithLoRA
from loradock.engine.layers.router import RouterWithLoRA
from loradock.engine.layers.row import RowParallelLinearWithLoRA, RowParallelLinearWithShardedLoRA
from loradock.engine.layers.tensor_parallel import (
    ColumnParallelLinear,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from loradock.engine.models.library.names import Conv1D
from loradock.engine.punica.mapping import LoRAMapping, LoRAMappingType

__all__ = [
    "CONVOLUTION_WRAPPERS",
    "FULLY_SHARDED",
    "MIXED_WRAPPERS",
    "WRAPPERS",
    "BaseLayerWithLoRA",
    "ClassificationHeadWithLoRA",
    "ColumnParallelLinear",
    "ColumnParallelLinearWithLoRA",
    "ColumnParallelLinearWithShardedLoRA",
    "ConvolutionWithLoRA",
    "FusedMoE3DWithLoRA",
    "FusedMoE3DWithShardedLoRA",
    "FusedMoEWithLoRA",
    "FusedMoEWithShardedLoRA",
    "LoRAMapping",
    "LoRAMappingType",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinear",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithShardedLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithShardedLoRA",
    "PPMissingLayer",
    "ParallelHead",
    "QKVParallelLinear",
    "QKVParallelLinearWithLoRA",
    "QKVParallelLinearWithShardedLoRA",
    "ReplicatedLinearWithLoRA",
    "Role",
    "RouterWithLoRA",
    "RowParallelLinear",
    "RowParallelLinearWithLoRA",
    "RowParallelLinearWithShardedLoRA",
    "SliceShape",
    "VocabParallelEmbedding",
    "VocabParallelEmbeddingWithLoRA",
    "WrapperRule",
    "wrapper_of",
    "wrappers_for",
]


class Role(Enum):
    """The function of a layer in its model, where the type does not determine it."""

    BODY = "body"
    HEAD = "language-model head"
    CLASSIFIER = "classification head"


class WrapperRule(NamedTuple):
    """Layers of this role and type are wrapped by `wrapper` if its `can_replace_layer` agrees."""

    role: Role
    base_type: type[nn.Module]
    wrapper: type[BaseLayerWithLoRA]


WRAPPERS: Final = (
    WrapperRule(Role.BODY, QKVParallelLinear, MergedQKVParallelLinearWithLoRA),
    WrapperRule(Role.BODY, QKVParallelLinear, QKVParallelLinearWithLoRA),
    WrapperRule(Role.BODY, MergedColumnParallelLinear, MergedColumnParallelLinearWithLoRA),
    WrapperRule(
        Role.BODY, MergedColumnParallelLinear, MergedColumnParallelLinearVariableSliceWithLoRA
    ),
    WrapperRule(Role.BODY, ColumnParallelLinear, ColumnParallelLinearWithLoRA),
    WrapperRule(Role.BODY, RowParallelLinear, RowParallelLinearWithLoRA),
    WrapperRule(Role.BODY, nn.Linear, ReplicatedLinearWithLoRA),
    WrapperRule(Role.BODY, Conv1D, ReplicatedLinearWithLoRA),
    WrapperRule(Role.BODY, nn.Embedding, VocabParallelEmbeddingWithLoRA),
    WrapperRule(Role.HEAD, nn.Linear, LogitsProcessorWithLoRA),
    WrapperRule(Role.CLASSIFIER, nn.Linear, ClassificationHeadWithLoRA),
    WrapperRule(Role.BODY, nn.Module, FusedMoE3DWithLoRA),
    WrapperRule(Role.BODY, nn.Module, FusedMoEWithLoRA),
    WrapperRule(Role.BODY, nn.Module, RouterWithLoRA),
)
"""In order of preference: the first rule that matches a layer determines its wrapper."""

CONVOLUTION_WRAPPERS: Final = tuple(
    WrapperRule(Role.BODY, kind, ConvolutionWithLoRA) for kind in CONVOLUTIONS
)
"""Further rules for models that are taken as they are; no probe is made for convolutions."""

MIXED_WRAPPERS: Final = tuple(rule for rule in WRAPPERS if rule.wrapper is not FusedMoE3DWithLoRA)
"""The table for mixed formats of expert adapters: 3-D adapters are split when they are loaded."""

FULLY_SHARDED: Final[Mapping[type[BaseLayerWithLoRA], type[BaseLayerWithLoRA]]] = {
    ColumnParallelLinearWithLoRA: ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinearWithLoRA: MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA: MergedQKVParallelLinearWithShardedLoRA,
    QKVParallelLinearWithLoRA: QKVParallelLinearWithShardedLoRA,
    RowParallelLinearWithLoRA: RowParallelLinearWithShardedLoRA,
    FusedMoEWithLoRA: FusedMoEWithShardedLoRA,
    FusedMoE3DWithLoRA: FusedMoE3DWithShardedLoRA,
}
"""Replacements of wrappers for fully sharded adapters; other wrappers are the same there."""


def wrappers_for(mixed_experts: bool, fully_sharded: bool) -> tuple[WrapperRule, ...]:
    """Return the table for these two fields of `LoRAConfig`."""
    table = MIXED_WRAPPERS if mixed_experts else WRAPPERS
    if not fully_sharded:
        return table
    return tuple(
        rule._replace(wrapper=FULLY_SHARDED.get(rule.wrapper, rule.wrapper)) for rule in table
    )


def wrapper_of(
    layer: nn.Module, role: Role = Role.BODY, table: Sequence[WrapperRule] = WRAPPERS
) -> type[BaseLayerWithLoRA] | None:
    """Return the class that wraps `layer`; None for a layer that is not wrapped."""
    for rule in table:
        fits = rule.role is role and isinstance(layer, rule.base_type)
        if fits and rule.wrapper.can_replace_layer(layer):
            return rule.wrapper
    return None
