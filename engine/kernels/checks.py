"""Checks of a launch's operands, made before any memory is touched.

A check compares shapes, dtypes, strides and devices with the operation's specification, which is
its reference. Messages name the operation, what was found and what is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.operands import Groups, LoRASlices, accumulator_dtype
from loradock.engine.layout import ModuleKind


def check_linear(y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `linear_reference` is defined for these."""
    _check_kind("linear", slices, ModuleKind.LINEAR)
    _check_groups("linear", slices, groups.rows, _last_slot(groups))
    _check_floating("linear", "x", x)
    _check("linear", "x", x, (groups.tokens, slices.in_features), slices)
    _check("linear", "y", y, (groups.tokens, sum(slices.out_features)), slices)
    _check_dtype("linear", "y", y, x.dtype)


def check_shrink(y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `shrink_reference` is defined for these."""
    _check_kind("shrink", slices, ModuleKind.LINEAR)
    _check_groups("shrink", slices, groups.rows, _last_slot(groups))
    _check_floating("shrink", "x", x)
    _check("shrink", "x", x, (groups.tokens, slices.in_features), slices)
    _check("shrink", "y", y, (len(slices.columns), groups.tokens, slices.rank_max), slices)
    _check_dtype("shrink", "y", y, accumulator_dtype(x.dtype))


def check_expand(y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `expand_reference` is defined for these."""
    _check_kind("expand", slices, ModuleKind.LINEAR)
    _check_groups("expand", slices, groups.rows, _last_slot(groups))
    _check_floating("expand", "y", y)
    _check("expand", "x", x, (len(slices.columns), groups.tokens, slices.rank_max), slices)
    _check("expand", "y", y, (groups.tokens, sum(slices.out_features)), slices)
    _check_dtype("expand", "x", x, accumulator_dtype(y.dtype))


def check_embedding(y: Tensor, token_ids: Tensor, slices: LoRASlices, groups: Groups) -> None:
    """Raise ValueError unless `embedding_reference` is defined for these.

    The values of the ids are not checked.
    """
    _check_kind("embedding", slices, ModuleKind.EMBEDDING)
    _check_groups("embedding", slices, groups.rows, _last_slot(groups))
    _check_floating("embedding", "y", y)
    _check("embedding", "token_ids", token_ids, (groups.tokens,), slices)
    _check("embedding", "y", y, (groups.tokens, *slices.out_features), slices)
    _check_dtype("embedding", "token_ids", token_ids, torch.int64)


def check_experts(
    ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
) -> None:
    """Raise ValueError unless `experts_reference` is defined for these."""
    _check_experts("experts", slices, groups)
    _check_floating("experts", "x", x)
    _check("experts", "x", x, (len(groups.pairs), slices.in_features), slices)
    _check_outputs("experts", ys, slices, groups)
    _check_dtype("experts", "y", ys[0], x.dtype)


def check_experts_shrink(y: Tensor, x: Tensor, slices: LoRASlices, groups: ExpertGroups) -> None:
    """Raise ValueError unless `experts_shrink_reference` is defined for these."""
    operation, pairs = "experts_shrink", len(groups.pairs)
    _check_experts(operation, slices, groups)
    _check_floating(operation, "x", x)
    _check(operation, "x", x, (pairs, slices.in_features), slices)
    _check(operation, "y", y, (len(slices.columns), pairs, slices.rank_max), slices)
    _check_dtype(operation, "y", y, accumulator_dtype(x.dtype))


def check_experts_expand(
    ys: Sequence[Tensor], x: Tensor, slices: LoRASlices, groups: ExpertGroups
) -> None:
    """Raise ValueError unless `experts_expand_reference` is defined for these."""
    operation, pairs = "experts_expand", len(groups.pairs)
    _check_experts(operation, slices, groups)
    _check(operation, "x", x, (len(slices.columns), pairs, slices.rank_max), slices)
    _check_outputs(operation, ys, slices, groups)
    _check_floating(operation, "y", ys[0])
    _check_dtype(operation, "x", x, accumulator_dtype(ys[0].dtype))


def _check_experts(operation: str, slices: LoRASlices, groups: ExpertGroups) -> None:
    _check_kind(operation, slices, ModuleKind.EXPERTS)
    _check_groups(operation, slices, groups.pairs, max(groups.slots, default=-1))
    if groups.experts != slices.experts:
        raise ValueError(
            f"{operation}: the groups are of {groups.experts} experts; the layer has "
            f"{slices.experts}"
        )


def _check_outputs(
    operation: str, ys: Sequence[Tensor], slices: LoRASlices, groups: ExpertGroups
) -> None:
    """Check one output per slice; strides are free, the dtype is equal for all."""
    if len(ys) != len(slices.columns):
        raise ValueError(
            f"{operation}: {len(ys)} outputs; the layer has {len(slices.columns)} slices"
        )
    for y, out_features in zip(ys, slices.out_features, strict=True):
        _check_shape(operation, "y", y, (len(groups.pairs), out_features))
        _check_device(operation, "y", y, slices)
        _check_dtype(operation, "y", y, ys[0].dtype)


def _check(
    operation: str,
    name: str,
    found: Tensor,
    needed: tuple[int, ...],
    slices: LoRASlices,
) -> None:
    """Check shape, strides and device; a buffer's last size can be larger."""
    _check_shape(operation, name, found, needed, may_be_wider=len(needed) == 3)
    if found.shape and found.shape[-1] > 1 and found.stride(-1) != 1:
        raise ValueError(
            f"{operation}: {name} has strides {found.stride()}; the last one must be 1, so that "
            "the numbers of a row are contiguous"
        )
    _check_device(operation, name, found, slices)


def _check_shape(
    operation: str,
    name: str,
    found: Tensor,
    needed: tuple[int, ...],
    *,
    may_be_wider: bool = False,
) -> None:
    shape = tuple(found.shape)
    fits = len(shape) == len(needed) and shape[:-1] == needed[:-1]
    if not fits or shape[-1] < needed[-1] or (shape[-1] > needed[-1] and not may_be_wider):
        at_least = ", the last at least that" if may_be_wider else ""
        raise ValueError(
            f"{operation}: {name} is {list(shape)}; {list(needed)} is needed{at_least}"
        )


def _check_device(operation: str, name: str, found: Tensor, slices: LoRASlices) -> None:
    device = slices.directory.data.device
    if found.device != device:
        raise ValueError(f"{operation}: {name} is on {found.device}; the weights are on {device}")


def _check_dtype(operation: str, name: str, found: Tensor, needed: torch.dtype) -> None:
    if found.dtype != needed:
        raise ValueError(f"{operation}: {name} is {found.dtype}; {needed} is needed")


def _check_floating(operation: str, name: str, found: Tensor) -> None:
    if not found.is_floating_point():
        raise ValueError(f"{operation}: {name} is {found.dtype}; a floating dtype is needed")


def _last_slot(groups: Groups) -> int:
    """Return the highest slot, which is the last because groups are sorted; -1 without groups."""
    return groups.spans[-1].slot if groups.spans else -1


def _check_groups(operation: str, slices: LoRASlices, rows: Tensor, highest: int) -> None:
    """Check the device of the groups' tables, and that the highest slot is in the directory."""
    _check_device(operation, "the groups' table of rows", rows, slices)
    slots = len(slices.directory.host_ranks)
    if highest >= slots:
        raise ValueError(f"{operation}: a group is of slot {highest}; the directory has {slots}")


def _check_kind(operation: str, slices: LoRASlices, needed: ModuleKind) -> None:
    if slices.kind is not needed:
        raise ValueError(f"{operation}: the layer's kind is {slices.kind}; {needed} is needed")
