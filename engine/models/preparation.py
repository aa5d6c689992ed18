"""The preparation of a model's layers: find candidates, select targets, probe, pack and wrap.

A layer is wrapped only if the probe observed the inputs that its wrapper assumes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import mode
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import nn

from loradock.engine.errors import ModelNotRun, ModelRefused
from loradock.engine.kernels.operands import RowOrder
from loradock.engine.layers import WRAPPERS, BaseLayerWithLoRA, Role, WrapperRule, wrapper_of
from loradock.engine.layers.packed import PackedLinear
from loradock.engine.layers.saved import ReplaceableNorm, is_replaceable_norm
from loradock.engine.layout import SAVED_SUFFIX, ModuleKind, ModuleShape, directory_columns
from loradock.engine.models.image_part import ImagePart
from loradock.engine.models.image_probing import record_image_inputs
from loradock.engine.models.library.names import PreTrainedModel
from loradock.engine.models.observation import ObservedInputs
from loradock.engine.models.packing import (
    PackingGroup,
    find_packing_groups,
    pack,
    with_implied_targets,
)
from loradock.engine.models.probing import (
    ProbeSpec,
    find_column_layers,
    record_layer_inputs,
)
from loradock.engine.punica.mapping import MappingType

CLASSIFIERS: Final = ("score", "classifier")
"""The names of classification heads in `transformers` models, which PEFT saves whole."""


class Candidate(NamedTuple):
    """A layer that the table has a wrapper for."""

    layer: nn.Module
    wrapper: type[BaseLayerWithLoRA]


class WrapScope(NamedTuple):
    """The part of a model that can be wrapped, and the wrappers.

    `targets`: suffixes or full names of layers, None for all. `table`: the wrapper of each kind of
    layer. `images`: the model's part that reads images, None if it has none; its layers are wrapped
    only if `adapts_images`.
    """

    targets: Sequence[str] | None = None
    table: Sequence[WrapperRule] = WRAPPERS
    images: ImagePart | None = None
    adapts_images: bool = False


class PreparedLayers(NamedTuple):
    """The result of preparing a model's layers.

    `layers`: wrappers by path. `parts`: the part of the model that each of them belongs to.
    `image_layers`: the paths of layers that read images and have a wrapper, wrapped or not.
    `norms`: norms that adapters can replace whole, which see every token. `spec`: the index of the
    probe that was chosen. `refusals`: why those before it were refused.
    """

    layers: dict[str, BaseLayerWithLoRA]
    parts: dict[str, MappingType]
    image_layers: frozenset[str]
    norms: Mapping[str, ReplaceableNorm] = MappingProxyType({})
    spec: int = 0
    refusals: tuple[str, ...] = ()


class ProbeResult(NamedTuple):
    """The layers that a probe found mappable, with their parts, and which of them share inputs.

    `unordered`: layers among them whose rows are in no order of a mapping.
    """

    parts: Mapping[str, MappingType]
    share_inputs: Callable[[Sequence[str]], bool]
    unordered: frozenset[str] = frozenset()

    def is_packable(self, group: PackingGroup) -> bool:
        """Return whether a group's children can be mapped, and read one input."""
        children = set(group.children)
        is_mapped = self.parts.keys() >= children and self.unordered.isdisjoint(children)
        return is_mapped and self.share_inputs(group.children)


def prepare_layers(
    model: PreTrainedModel, specs: Sequence[ProbeSpec], vocab_size: int, scope: WrapScope
) -> PreparedLayers:
    """Wrap the model's layers in place, and pack them if possible.

    The first of `specs` is chosen in which the model runs and all its layers can be mapped. A layer
    with several paths is wrapped once, under its first one. Raises `ModelRefused` for a model
    without a layer to wrap, a target that names none, and a model that can't be batched.
    """
    candidates = find_candidates(model, scope.table)
    if not candidates:
        raise ModelRefused("the model has no layer of a kind that can be wrapped")
    siblings = [
        child for group in find_packing_groups(model, candidates) for child in group.children
    ]
    layers = {name: candidate.layer for name, candidate in candidates.items()}
    norms = {
        name: module
        for name, module in model.named_modules()
        if name not in layers and is_replaceable_norm(module)
    }
    probed = _Probed(model, candidates, layers | norms, siblings)
    chosen, observed, refusals = _choose_probe(specs, probed, vocab_size, scope)
    spec = specs[chosen]
    image_layers = _image_layers(layers, scope.images, observed)
    excluded = frozenset() if scope.adapts_images else image_layers
    targets = _select_targets(candidates.keys() - excluded, scope.targets, excluded)
    language = {name: candidates[name] for name in candidates if name in targets - image_layers}
    results = [_language_result(spec, language, observed, explicit=scope.targets is not None)]
    if scope.images is not None and scope.adapts_images:
        of_images = {name: layers[name] for name in candidates if name in targets & image_layers}
        results.append(_image_result(scope.images, of_images, model.dtype, siblings))
    parts = {name: part for result in results for name, part in result.parts.items()}
    _check_targets(scope.targets, parts)
    groups = find_packing_groups(model, parts)
    packed = [group for group in groups if any(r.is_packable(group) for r in results)]
    parts |= {group.name: parts[group.children[0]] for group in packed}
    unordered = results[0].unordered
    columns = find_column_layers(spec, {name: layers[name] for name in unordered}, vocab_size)
    wrapped = _wrap(model, candidates, parts, packed, scope.table)
    for name in wrapped.keys() & unordered:
        wrapped[name].row_order = RowOrder.COLUMNS if name in columns else RowOrder.UNKNOWN
    replaceable = {
        name: ReplaceableNorm(norm)
        for name, norm in norms.items()
        if observed.inputs[name] and _can_be_mapped(name, observed, spec)
    }
    parts = {name: parts[name] for name in wrapped}
    return PreparedLayers(wrapped, parts, image_layers, replaceable, chosen, refusals)


class _Probed(NamedTuple):
    """Layers that a probe observes: `candidates` of all `modules`; `siblings` can share inputs."""

    model: nn.Module
    candidates: Mapping[str, Candidate]
    modules: Mapping[str, nn.Module]
    siblings: Sequence[str]


def _choose_probe(
    specs: Sequence[ProbeSpec], probed: _Probed, vocab_size: int, scope: WrapScope
) -> tuple[int, ObservedInputs, tuple[str, ...]]:
    """Return the first probe that passes and maps every layer it observed, and its observations.

    The last one that passes, if none does. The texts are the refusals of probes before it. Raises
    the refusals of all if none passes.
    """
    chosen: tuple[int, ObservedInputs] | None = None
    refusals: list[ModelRefused] = []
    for number, spec in enumerate(specs):
        if spec.is_last_resort and chosen is not None:
            break
        try:
            observed = record_layer_inputs(spec, probed.modules, vocab_size, probed.siblings)
        except ModelRefused as refusal:
            refusals.append(refusal)
            continue
        chosen = number, observed
        targets = scope.targets
        named = probed.candidates if targets is None else _named(probed.candidates, targets)
        if not _unordered(spec, named, observed):
            break
    if chosen is None:
        is_run = not all(isinstance(refusal, ModelNotRun) for refusal in refusals)
        kind = ModelRefused if is_run else ModelNotRun
        raise kind("; ".join(dict.fromkeys(map(str, refusals))))
    return *chosen, tuple(map(str, refusals))


def _unordered(spec: ProbeSpec, names: Collection[str], observed: ObservedInputs) -> frozenset[str]:
    """Return the layers that were observed with rows in no order of a mapping."""
    return frozenset(name for name in names if not observed.is_ordered(name, spec.rows))


def _can_be_mapped(norm: str, observed: ObservedInputs, spec: ProbeSpec) -> bool:
    """Return whether every input of a norm can be mapped, also in a packed pass of many rows."""
    is_ordered = observed.is_ordered(norm, spec.rows)
    return is_ordered and (bool(spec.rows.alone) or observed.sees_tokens(norm))


def prepare_unprobed(
    model: nn.Module, scope: WrapScope, unwrapped: Collection[str]
) -> PreparedLayers:
    """Wrap the layers of a model in place whose forward can't be tried out; none is packed.

    `unwrapped`: the paths of layers that can't be wrapped.

    Raises `ModelRefused` for a model without a layer to wrap, and for a target that names none.
    """
    candidates = find_candidates(model, scope.table, is_plain=True)
    known = {name: one for name, one in candidates.items() if name not in unwrapped}
    if not known:
        raise ModelRefused("the model has no layer of a kind that can be wrapped")
    targets = _select_targets(known, scope.targets, frozenset())
    mapped = [name for name in known if name in targets]
    wrapped = _wrap(model, known, mapped, (), scope.table)
    return PreparedLayers(wrapped, dict.fromkeys(wrapped, MappingType.LANGUAGE), frozenset())


def _image_layers(
    layers: Mapping[str, nn.Module], images: ImagePart | None, observed: ObservedInputs
) -> frozenset[str]:
    """Return the layers of the image part that no text runs."""
    if images is None:
        return frozenset()
    return frozenset(
        name for name, layer in layers.items() if layer in images and not observed.inputs[name]
    )


def _language_result(
    spec: ProbeSpec, candidates: Mapping[str, Candidate], observed: ObservedInputs, explicit: bool
) -> ProbeResult:
    unordered = _unordered(spec, candidates, observed)
    # PEFT adapts layers that are never called, without effect, and so their B stays zero.
    mapped = set(candidates)
    if not spec.is_tolerant:
        mapped = {name for name in mapped - unordered if observed.inputs[name]}
    unmapped = [name for name in candidates if name not in mapped]
    if unmapped and (explicit or not mapped):
        raise ModelRefused(
            f"layers {unmapped} do not receive every token of a batch in its order, so no adapter "
            "can be applied to them; name other layers in target_modules"
        )
    parts = dict.fromkeys(mapped, MappingType.LANGUAGE)
    return ProbeResult(parts, observed.share_inputs, unordered)


def _image_result(
    images: ImagePart,
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    siblings: Collection[str],
) -> ProbeResult:
    """Return the image layers that can be mapped, each as one of the tower or of the connector.

    The tower's are the encoder's layers with the most common number of rows per unit. A merger at
    the encoder's end has fewer rows, and belongs to the connector like the layers after it.
    """
    observed = record_image_inputs(images, layers, dtype, siblings)
    ratios = {name: rows for name in layers if (rows := observed.rows_per_unit(name)) is not None}
    if layers and not ratios:
        raise ModelRefused(
            f"layers {list(layers)} do not receive each image's rows separately, so no adapter can "
            "be applied to them; leave enable_tower_connector_lora off"
        )
    tower = [name for name in ratios if images.is_in_tower(layers[name])]
    usual = mode(ratios[name] for name in tower) if tower else None
    parts = dict.fromkeys(ratios, MappingType.CONNECTOR)
    parts |= {name: MappingType.TOWER for name in tower if ratios[name] == usual}
    return ProbeResult(parts, observed.share_inputs)


def _wrap(
    model: nn.Module,
    candidates: Mapping[str, Candidate],
    mapped: Collection[str],
    packed: Sequence[PackingGroup],
    table: Sequence[WrapperRule],
) -> dict[str, BaseLayerWithLoRA]:
    """Replace the mapped layers by wrappers; return the wrappers by path, in the model's order."""
    wrap = partial(_wrap_packed, table)
    wrapped = {group.name: pack(model, group, wrap) for group in packed}
    children = {child for group in packed for child in group.children}
    unpacked = [name for name in mapped if name not in wrapped and name not in children]
    wrapped |= {name: candidates[name].wrapper(candidates[name].layer) for name in unpacked}
    _replace(model, {wrapped[name].base_layer: wrapped[name] for name in unpacked})
    return {name: wrapped[name] for name, _ in model.named_modules() if name in wrapped}


def module_shapes(
    layers: Mapping[str, BaseLayerWithLoRA],
    norms: Mapping[str, ReplaceableNorm] = MappingProxyType({}),
) -> tuple[ModuleShape, ...]:
    """Return the directory's columns: the layers' slices in their order, then the norms."""
    shapes: list[ModuleShape] = []
    for name, layer in layers.items():
        shapes += layer.module_shapes(name, first_column=directory_columns(shapes))
    for name, norm in norms.items():
        sizes = (1, norm.features, directory_columns(shapes))
        shapes.append(
            ModuleShape(name + SAVED_SUFFIX, *sizes, kind=ModuleKind.HEAD, is_optional=True)
        )
    return tuple(shapes)


def find_candidates(
    model: nn.Module, table: Sequence[WrapperRule] = WRAPPERS, *, is_plain: bool = False
) -> dict[str, Candidate]:
    """Return every layer that has a wrapper, under its first path.

    In a model that is taken as it is (`is_plain`), all are layers of the body.
    """
    roles = {} if is_plain else _roles(model)
    return {
        name: Candidate(layer, wrapper)
        for name, layer in model.named_modules()
        if (wrapper := wrapper_of(layer, roles.get(layer, Role.BODY), table)) is not None
    }


def _roles(model: nn.Module) -> dict[nn.Module, Role]:
    """Return the roles of the layers that are not body layers; without `transformers` none."""
    if not isinstance(model, PreTrainedModel):
        return {}
    children = dict(model.named_children())
    heads = [children[name] for name in CLASSIFIERS if name in children]
    roles = {layer: Role.CLASSIFIER for head in heads for layer in head.modules()}
    head = model.get_output_embeddings()
    return roles if head is None else roles | {head: Role.HEAD}


def _select_targets(
    candidates: Collection[str], targets: Sequence[str] | None, excluded: Collection[str]
) -> set[str]:
    """Return the candidates that `targets` name.

    A packed parent and its children imply each other.
    """
    if targets is None:
        return set(candidates)
    missing = [target for target in targets if not _named(candidates, [target])]
    if _named(excluded, missing):
        raise ModelRefused(
            f"target_modules {missing} name layers of the tower or the connector; set "
            "enable_tower_connector_lora to wrap them"
        )
    if missing:
        suffixes = sorted({name.rpartition(".")[2] for name in candidates})
        raise ModelRefused(
            f"target_modules {missing} name no layer that can be wrapped; "
            f"allowed are full names or these suffixes: {', '.join(suffixes)}"
        )
    return _named(candidates, targets)


def _named(names: Collection[str], targets: Sequence[str]) -> set[str]:
    """Return the names that targets name, or imply: see `with_implied_targets`."""
    implied = set().union(*map(with_implied_targets, targets))
    return {
        name
        for name in names
        if any(name == target or name.endswith("." + target) for target in implied)
    }


def _check_targets(targets: Sequence[str] | None, mapped: Collection[str]) -> None:
    """Raise `ModelRefused` for targets that name no mappable layer."""
    unmapped = [target for target in targets or () if not _named(mapped, [target])]
    if unmapped:
        raise ModelRefused(
            f"target_modules {unmapped} name layers that do not receive each image's rows "
            "separately, so no adapter can be applied to them; name other layers"
        )


def _wrap_packed(table: Sequence[WrapperRule], layer: PackedLinear) -> BaseLayerWithLoRA:
    wrapper = wrapper_of(layer, table=table)
    if wrapper is None:
        raise TypeError(f"the table has no wrapper for {type(layer).__name__}")
    return wrapper(layer)


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each key by its value under all of its paths."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            model.set_submodule(path, replacements[module])
