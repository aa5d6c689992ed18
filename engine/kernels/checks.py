"""What a launcher makes sure of before it touches memory.

What it is: shapes, dtypes, strides and devices against what an operation's reference says. What it
is not: arithmetic. One rule: a message names the operation, what was found and what is needed.

`signature` is what these checks depend on beside the layer and the groups: who has checked one may
skip equal ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from engine.layout import ModuleKind

Signature = tuple[object, ...]


def signature(y: Tensor, x: Tensor) -> Signature:
    """What is checked of two tensors."""
    return (y.shape, y.stride(), y.dtype, y.device, x.shape, x.stride(), x.dtype, x.device)


def check_linear(y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `linear_reference` is defined for these."""
    _check_kind("linear", weights, ModuleKind.LINEAR)
    _check_groups("linear", weights, groups.rows, _last_slot(groups))
    _check_floating("linear", "x", x)
    _check("linear", "x", x, (groups.tokens, weights.in_features), weights)
    _check("linear", "y", y, (groups.tokens, sum(weights.out_features)), weights)
    _check_dtype("linear", "y", y, x.dtype)


def check_shrink(y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `shrink_reference` is defined for these."""
    _check_kind("shrink", weights, ModuleKind.LINEAR)
    _check_groups("shrink", weights, groups.rows, _last_slot(groups))
    _check_floating("shrink", "x", x)
    _check("shrink", "x", x, (groups.tokens, weights.in_features), weights)
    _check("shrink", "y", y, (len(weights.columns), groups.tokens, _rank_max(weights)), weights)
    _check_dtype("shrink", "y", y, accumulator_dtype(x.dtype))


def check_expand(y: Tensor, x: Tensor, weights: LoRASlices, groups: Groups, offset: int) -> None:
    """Raise ValueError unless `expand_reference` is defined for these."""
    _check_kind("expand", weights, ModuleKind.LINEAR)
    _check_groups("expand", weights, groups.rows, _last_slot(groups))
    _check_floating("expand", "y", y)
    _check("expand", "x", x, (len(weights.columns), groups.tokens, _rank_max(weights)), weights)
    width = offset + sum(weights.out_features)
    _check("expand", "y", y, (groups.tokens, width), weights, wider=True)
    _check_dtype("expand", "x", x, accumulator_dtype(y.dtype))
    if offset < 0:
        raise ValueError(f"expand: offset is {offset}; at least 0 is needed")


def check_embedding(y: Tensor, token_ids: Tensor, weights: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `embedding_reference` is defined for these, the ids' values apart."""
    _check_kind("embedding", weights, ModuleKind.EMBEDDING)
    _check_groups("embedding", weights, groups.rows, _last_slot(groups))
    _check_floating("embedding", "y", y)
    _check("embedding", "token_ids", token_ids, (groups.tokens,), weights)
    _check("embedding", "y", y, (groups.tokens, *weights.out_features), weights)
    _check_dtype("embedding", "token_ids", token_ids, torch.int64)


def check_experts(
    ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups
) -> None:
    """Raise ValueError unless `experts_reference` is defined for these."""
    _check_experts("experts", weights, groups)
    _check_floating("experts", "x", x)
    _check("experts", "x", x, (len(groups.pairs), weights.in_features), weights)
    _check_outputs("experts", ys, weights, groups)
    _check_dtype("experts", "y", ys[0], x.dtype)


def check_experts_shrink(y: Tensor, x: Tensor, weights: LoRASlices, groups: ExpertGroups) -> None:
    """Raise ValueError unless `experts_shrink_reference` is defined for these."""
    operation, pairs = "experts_shrink", len(groups.pairs)
    _check_experts(operation, weights, groups)
    _check_floating(operation, "x", x)
    _check(operation, "x", x, (pairs, weights.in_features), weights)
    _check(operation, "y", y, (len(weights.columns), pairs, _rank_max(weights)), weights)
    _check_dtype(operation, "y", y, accumulator_dtype(x.dtype))


def check_experts_expand(
    ys: Sequence[Tensor], x: Tensor, weights: LoRASlices, groups: ExpertGroups
) -> None:
    """Raise ValueError unless `experts_expand_reference` is defined for these."""
    operation, pairs = "experts_expand", len(groups.pairs)
    _check_experts(operation, weights, groups)
    _check(operation, "x", x, (len(weights.columns), pairs, _rank_max(weights)), weights)
    _check_outputs(operation, ys, weights, groups)
    _check_floating(operation, "y", ys[0])
    _check_dtype(operation, "x", x, accumulator_dtype(ys[0].dtype))


def _check_experts(operation: str, weights: LoRASlices, groups: ExpertGroups) -> None:
    _check_kind(operation, weights, ModuleKind.EXPERTS)
    _check_groups(operation, weights, groups.pairs, max(groups.slots, default=-1))
    if groups.experts != weights.experts:
        raise ValueError(
            f"{operation}: the groups are of {groups.experts} experts; the layer has "
            f"{weights.experts}"
        )


def _check_outputs(
    operation: str, ys: Sequence[Tensor], weights: LoRASlices, groups: ExpertGroups
) -> None:
    """One output a slice, of any strides and all of one dtype."""
    if len(ys) != len(weights.columns):
        raise ValueError(
            f"{operation}: {len(ys)} outputs; the layer has {len(weights.columns)} slices"
        )
    for y, width in zip(ys, weights.out_features, strict=True):
        _check_shape(operation, "y", y, (len(groups.pairs), width))
        _check_device(operation, "y", y, weights)
        _check_dtype(operation, "y", y, ys[0].dtype)


def _rank_max(weights: LoRASlices) -> int:
    """The widest rank that any slot has in the layer's columns."""
    return int(weights.directory.host_ranks[:, list(weights.columns)].max())


def _check(
    operation: str,
    name: str,
    found: Tensor,
    needed: tuple[int, ...],
    weights: LoRASlices,
    *,
    wider: bool = False,
) -> None:
    """Shape, strides and device; `wider` (and a buffer's last size) may exceed what is needed."""
    _check_shape(operation, name, found, needed, may_be_wider=wider or len(needed) == 3)
    if found.shape and found.shape[-1] > 1 and found.stride(-1) != 1:
        raise ValueError(
            f"{operation}: {name} has strides {found.stride()}; its last has to be 1, so that a "
            "row's numbers lie side by side"
        )
    _check_device(operation, name, found, weights)


def _check_shape(
    operation: str, name: str, found: Tensor, needed: tuple[int, ...], *, may_be_wider: bool = False
) -> None:
    shape = tuple(found.shape)
    fits = len(shape) == len(needed) and shape[:-1] == needed[:-1]
    if not fits or shape[-1] < needed[-1] or (shape[-1] > needed[-1] and not may_be_wider):
        at_least = ", the last at least that" if may_be_wider else ""
        raise ValueError(
            f"{operation}: {name} is {list(shape)}; {list(needed)} is needed{at_least}"
        )


def _check_device(operation: str, name: str, found: Tensor, weights: LoRASlices) -> None:
    device = weights.directory.data.device
    if found.device != device:
        raise ValueError(f"{operation}: {name} is on {found.device}; the weights are on {device}")


def _check_dtype(operation: str, name: str, found: Tensor, needed: torch.dtype) -> None:
    if found.dtype != needed:
        raise ValueError(f"{operation}: {name} is {found.dtype}; {needed} is needed")


def _check_floating(operation: str, name: str, found: Tensor) -> None:
    if not found.is_floating_point():
        raise ValueError(f"{operation}: {name} is {found.dtype}; a floating dtype is needed")


def _last_slot(groups: Groups) -> int:
    """The highest slot, for groups are sorted by it; -1 where there is no group."""
    return groups.spans[-1].slot if groups.spans else -1


def _check_groups(operation: str, weights: LoRASlices, rows: Tensor, highest: int) -> None:
    """The device of the groups' tables, and that their highest slot is one of the directory's."""
    _check_device(operation, "the groups' table of rows", rows, weights)
    slots = len(weights.directory.host_ranks)
    if highest >= slots:
        raise ValueError(f"{operation}: a group is of slot {highest}; the directory has {slots}")


def _check_kind(operation: str, weights: LoRASlices, needed: ModuleKind) -> None:
    if weights.kind is not needed:
        raise ValueError(f"{operation}: the layer's kind is {weights.kind}; {needed} is needed")
