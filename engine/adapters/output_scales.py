"""Per-output scales and biases: DoRA's magnitudes, biases in B, and trained biases.

With these vectors an adapter's output is `scale * base_output + shift + delta`, with a scale and a
shift for each output, which are computed here from the base layer's own weight and bias.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.pairs import TensorPair
from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.problems import Problems
from loradock.engine.adapters.target import (
    AdapterTarget,
    BaseWeights,
    ModulePathResolver,
    ReadBase,
)
from loradock.engine.adapters.tensor_names import is_within, path_of
from loradock.engine.adapters.weights import Tensors
from loradock.engine.errors import AdapterDoesNotFit, NotFinite
from loradock.engine.layout import AFFINE_SUFFIX, SAVED_SUFFIX, ModuleKind, ModuleShape

MAGNITUDE: Final = "magnitude"
B_BIAS: Final = "bias in B"
BIAS: Final = "bias"

_PATTERNS: Final = {
    MAGNITUDE: re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?\Z"),
    B_BIAS: re.compile(r"(.+)\.lora_B\.bias\Z"),
    BIAS: re.compile(r"(.+?)(?:\.base_layer)?\.bias\Z"),
}


class OutputVector(NamedTuple):
    """A per-output scale or bias of a module; `pair` has its tensor as `a`, and no `b`."""

    pair: TensorPair
    role: str


def take_vectors(
    names: Iterable[str], helper: PEFTHelper, resolver: ModulePathResolver
) -> tuple[list[OutputVector], list[str]]:
    """Return the vectors that the config specifies, by this model's paths, and the other names."""
    is_used = {MAGNITUDE: helper.use_dora, B_BIAS: helper.lora_bias, BIAS: helper.bias != "none"}
    patterns = {role: pattern for role, pattern in _PATTERNS.items() if is_used[role]}
    if not patterns:
        return [], [*names]
    vectors: list[OutputVector] = []
    others: list[str] = []
    for name in names:
        path = path_of(name)
        found = next(((r, m[1]) for r, p in patterns.items() if (m := p.match(path))), None)
        is_saved = found and any(is_within(found[1], saved) for saved in helper.modules_to_save)
        if found is None or is_saved or resolver.skips(path) or resolver.drops(found[1]):
            others.append(name)
        else:
            module = resolver.resolve(found[1])
            pair = TensorPair(module, name, None, 1, 1.0, 1.0, ModuleKind.HEAD)
            vectors.append(OutputVector(pair, found[0]))
    return vectors, others


def check_vectors(
    vectors: Collection[OutputVector],
    pairs: Iterable[TensorPair],
    tensors: Tensors,
    helper: PEFTHelper,
    model: AdapterTarget,
    problems: Problems,
) -> None:
    """Add vectors of other layers or lengths, and adapted modules without the vector they need."""
    adapted = {pair.module for pair in pairs if pair.kind is not ModuleKind.HEAD}
    for (module, name, *_), role in vectors:
        column, shape = _column_for(module, role, model), list(tensors[name].shape)
        if column is None:
            problems.add(
                AdapterDoesNotFit,
                f"{name} is a {role} of a layer for which none is served; they are for linear "
                "layers that are not quantised, on one rank, and biases also for norms",
            )
        elif shape != [column.out_features] or not tensors[name].dtype.is_floating_point:
            problems.add(
                AdapterDoesNotFit,
                f"{name} is {tensors[name].dtype} {shape}; {column.out_features} floating values "
                "are needed",
            )
        elif role != BIAS and module not in adapted:
            problems.add(AdapterDoesNotFit, f"{name} has no matching lora_A and lora_B")
    needed = {MAGNITUDE: helper.use_dora, B_BIAS: helper.lora_bias}
    for role in (role for role, is_needed in needed.items() if is_needed):
        present = {vector.pair.module for vector in vectors if vector.role == role}
        missing = sorted(adapted - present)
        problems.add_each(AdapterDoesNotFit, f"adapted modules without a {role}", missing)
    if helper.bias != "none":
        trained = {vector.pair.module for vector in vectors if vector.role == BIAS}
        left = sorted(one for one in adapted - trained if _has_bias(model.read_base(one)))
        problems.add_each(AdapterDoesNotFit, "adapted modules without their bias", left)


def _column_for(module: str, role: str, model: AdapterTarget) -> ModuleShape | None:
    """Return the column that a vector goes to: of a norm's bias the column of the whole norm."""
    whole = model.modules.get(module + SAVED_SUFFIX)
    is_norm = whole is not None and whole.in_features == 1 and role == BIAS
    return whole if is_norm else model.modules.get(module + AFFINE_SUFFIX)


def _has_bias(base: BaseWeights | None) -> bool:
    return base is not None and base.bias is not None


def fold_vectors(
    loras: dict[str, LoRALayerWeights],
    vectors: Iterable[OutputVector],
    tensors: Mapping[str, Tensor],
    read_base: ReadBase,
) -> None:
    """Add each module's scale and shift to `loras`, and multiply B by the scale, in place.

    Everything is computed in float32 and rounded once. Raises `AdapterDoesNotFit` for a module
    whose base weights can't be read, and `NotFinite`.
    """
    by_module: dict[str, dict[str, Tensor]] = {}
    for vector in vectors:
        found = by_module.setdefault(vector.pair.module, {})
        found[vector.role] = tensors[vector.pair.a].float()
    for module, found in by_module.items():
        base = read_base(module)
        if base is None:
            raise AdapterDoesNotFit(f"{module}'s base weight can't be read, which its vectors need")
        if base.weight.ndim == 1:
            _add_norm(loras, module, base.weight, found[BIAS])
            continue
        lora = loras.get(module)
        scale, shift = _scale_and_shift(base, lora, found)
        if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
            raise NotFinite(f"{module}'s outputs would be scaled by values that are not finite")
        dtype = next(iter(found.values())).dtype if lora is None else lora.lora_b.dtype
        if lora is not None and MAGNITUDE in found:
            scaled_b = (scale[:, None] * lora.lora_b.float()).to(dtype)
            loras[module] = replace(lora, lora_b=scaled_b)
        name = module + AFFINE_SUFFIX
        columns = (scale[:, None].to(dtype), shift[:, None].to(dtype))
        loras[name] = LoRALayerWeights(name, 1, 1.0, *columns, 1.0, kind=ModuleKind.HEAD)


def _add_norm(
    loras: dict[str, LoRALayerWeights], module: str, weight: Tensor, bias: Tensor
) -> None:
    """Add a norm whose bias alone was trained, as a whole one."""
    name = module + SAVED_SUFFIX
    columns = (weight.detach().cpu()[:, None], bias[:, None])
    loras[name] = LoRALayerWeights(name, 1, 1.0, *columns, 1.0, kind=ModuleKind.HEAD)


def _scale_and_shift(
    base: BaseWeights, lora: LoRALayerWeights | None, found: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    weight = base.weight.detach().cpu().float()
    scale = weight.new_ones(len(weight))
    base_bias = scale.new_zeros(len(weight)) if base.bias is None else base.bias.cpu().float()
    if lora is not None and MAGNITUDE in found:
        delta = lora.scaling * (lora.lora_b.cpu().float() @ lora.lora_a.cpu().float())
        scale = found[MAGNITUDE].cpu() / torch.linalg.vector_norm(weight + delta, dim=1)
    shift = found.get(BIAS, base_bias).cpu() - scale * base_bias
    if lora is not None and B_BIAS in found:
        shift = shift + scale * lora.scaling * found[B_BIAS].cpu()
    return scale, shift
