"""The walk over a model that decides, layer by layer, what is wrapped and what is packed.

What it is: candidates from the table of wrappers, the targets among them, the probe's word on each,
and the exchange. What it is not: the table (`engine.layers`), the families (`engine.packing`) or
the probe. One rule: a layer is wrapped only if it was seen to do what its wrapper assumes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import mode
from typing import Final, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import ModelRefused
from engine.layers import WRAPPERS, BaseLayerWithLoRA, Role, Row, wrapper_of
from engine.layers.packed import PackedLinear
from engine.layout import ModuleShape, directory_columns
from engine.models.image_layer_probe import watch_images
from engine.models.packing import Group, find_groups, pack, with_relatives
from engine.models.probe import SAMPLED_ROWS, RowShapes, Sightings, Trial, watch_layers
from engine.models.vision.encoder import ImagePart
from engine.punica.mapping import MappingType

_ROWS: Final[Mapping[Role, RowShapes]] = {
    Role.HEAD: SAMPLED_ROWS,
    Role.CLASSIFIER: SAMPLED_ROWS,
}
"""What a layer must have seen to be mapped, by its role; the body, what the trial says."""

CLASSIFIERS: Final = ("score", "classifier")
"""What `transformers` calls the classification head of a model that has one, and PEFT saves."""


class Candidate(NamedTuple):
    """A layer that the table has a wrapper for."""

    layer: nn.Module
    role: Role
    wrapper: type[BaseLayerWithLoRA]


class Scope(NamedTuple):
    """What of a model may be wrapped, and by what.

    `targets`: suffixes or full names of layers, None for all. `table`: what wraps what. `images`:
    the model's part that reads images, None where it has none; wrapped only if `adapts_images`.
    """

    targets: Sequence[str] | None = None
    table: Sequence[Row] = WRAPPERS
    images: ImagePart | None = None
    adapts_images: bool = False


class Prepared(NamedTuple):
    """What became of a model's layers.

    `layers`: wrappers by their path. `parts`: the part of the model that each of them is of.
    `image_layers`: the paths of those that read images and have a wrapper, wrapped or not.
    """

    layers: dict[str, BaseLayerWithLoRA]
    parts: dict[str, MappingType]
    image_layers: frozenset[str]


class Seen(NamedTuple):
    """What a trial saw: the layers that can be mapped, with their part, and who shares inputs."""

    parts: Mapping[str, MappingType]
    share_inputs: Callable[[Sequence[str]], bool]

    def is_packable(self, group: Group) -> bool:
        """Whether a group's children can be mapped, and read one input."""
        return self.parts.keys() >= set(group.children) and self.share_inputs(group.children)


def prepare_layers(model: PreTrainedModel, trial: Trial, vocab_size: int, scope: Scope) -> Prepared:
    """Wrap the model's layers in place, packed where that can be.

    A layer that is reachable by several paths is wrapped once, under its first. Raises
    `ModelRefused` for a model without a layer to wrap, a target that names none, and a model that
    can't be batched.
    """
    candidates = find_candidates(model, scope.table)
    if not candidates:
        raise ModelRefused("the model has no layer of a kind that can be wrapped")
    siblings = [child for group in find_groups(model, candidates) for child in group.children]
    layers = {name: found.layer for name, found in candidates.items()}
    sightings = watch_layers(trial, layers, vocab_size, siblings)
    of_images = _unseen(layers, scope.images, sightings)
    left_out = frozenset() if scope.adapts_images else of_images
    named = _targeted(candidates.keys() - left_out, scope.targets, left_out)
    texts = {name: candidates[name] for name in candidates if name in named - of_images}
    seen = [_judge_texts(trial, texts, sightings, explicit=scope.targets is not None)]
    if scope.images is not None and scope.adapts_images:
        shown = {name: layers[name] for name in candidates if name in named & of_images}
        seen.append(_try_images(scope.images, shown, model.dtype, siblings))
    parts = {name: part for one in seen for name, part in one.parts.items()}
    _check_targets(scope.targets, parts)
    groups = find_groups(model, parts)
    packed = [group for group in groups if any(one.is_packable(group) for one in seen)]
    parts |= {group.name: parts[group.children[0]] for group in packed}
    wrapped = _wrap(model, candidates, parts, packed, scope.table)
    return Prepared(wrapped, {name: parts[name] for name in wrapped}, of_images)


def _unseen(
    layers: Mapping[str, nn.Module], images: ImagePart | None, sightings: Sightings
) -> frozenset[str]:
    """The layers in the model's part that reads images, as far as texts do not run them."""
    if images is None:
        return frozenset()
    return frozenset(
        name for name, layer in layers.items() if layer in images and not sightings.calls[name]
    )


def _judge_texts(
    trial: Trial, named: Mapping[str, Candidate], sightings: Sightings, explicit: bool
) -> Seen:
    rows = {name: _ROWS.get(found.role, trial.rows) for name, found in named.items()}
    mapped = _mapped(rows, sightings, explicit)
    return Seen(dict.fromkeys(mapped, MappingType.LANGUAGE), sightings.share_inputs)


def _try_images(
    images: ImagePart,
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    siblings: Collection[str],
) -> Seen:
    """The tower's are the encoder's layers with as many rows for each unit as most of them have.

    A merger at an encoder's end has fewer, and is the connector's as what stands behind it is.
    """
    seen = watch_images(images, layers, dtype, siblings)
    found = {name: rows for name in layers if (rows := seen.rows_per_unit(name)) is not None}
    if layers and not found:
        raise ModelRefused(
            f"layers {list(layers)} do not see every image's rows by themselves, so no adapter can "
            "be applied to them; leave enable_tower_connector_lora off"
        )
    tower = [name for name in found if images.is_in_tower(layers[name])]
    usual = mode(found[name] for name in tower) if tower else None
    parts = dict.fromkeys(found, MappingType.CONNECTOR)
    parts |= {name: MappingType.TOWER for name in tower if found[name] == usual}
    return Seen(parts, seen.share_inputs)


def _wrap(
    model: PreTrainedModel,
    candidates: Mapping[str, Candidate],
    mapped: Collection[str],
    packed: Sequence[Group],
    table: Sequence[Row],
) -> dict[str, BaseLayerWithLoRA]:
    """Put wrappers in place of what is mapped; wrappers by path, in the model's order."""
    wrap = partial(_wrap_packed, table)
    wrapped = {group.name: pack(model, group, wrap) for group in packed}
    children = {child for group in packed for child in group.children}
    alone = [name for name in mapped if name not in wrapped and name not in children]
    wrapped |= {name: candidates[name].wrapper(candidates[name].layer) for name in alone}
    _replace(model, {wrapped[name].base_layer: wrapped[name] for name in alone})
    return {name: wrapped[name] for name, _ in model.named_modules() if name in wrapped}


def module_shapes(layers: Mapping[str, BaseLayerWithLoRA]) -> tuple[ModuleShape, ...]:
    """The directory's columns: every layer's slices, in the layers' order."""
    shapes: list[ModuleShape] = []
    for name, layer in layers.items():
        shapes += layer.module_shapes(name, first=directory_columns(shapes))
    return tuple(shapes)


def find_candidates(
    model: PreTrainedModel, table: Sequence[Row] = WRAPPERS
) -> dict[str, Candidate]:
    """Every layer that has a wrapper, under its first path."""
    roles = _roles(model)
    return {
        name: Candidate(layer, role, wrapper)
        for name, layer in model.named_modules()
        if (wrapper := wrapper_of(layer, role := roles.get(layer, Role.BODY), table)) is not None
    }


def _roles(model: PreTrainedModel) -> dict[nn.Module, Role]:
    """The layers that are more than their type says."""
    children = dict(model.named_children())
    heads = [children[name] for name in CLASSIFIERS if name in children]
    roles = {layer: Role.CLASSIFIER for head in heads for layer in head.modules()}
    head = model.get_output_embeddings()
    return roles if head is None else roles | {head: Role.HEAD}


def _targeted(
    candidates: Collection[str], targets: Sequence[str] | None, left_out: Collection[str]
) -> set[str]:
    """The candidates that `targets` name; a packed parent and its children imply each other."""
    if targets is None:
        return set(candidates)
    implied = {target: with_relatives(target) for target in targets}
    missing = [t for t in targets if not any(_is_named(name, implied[t]) for name in candidates)]
    if any(_is_named(name, implied[target]) for target in missing for name in left_out):
        raise ModelRefused(
            f"target_modules {missing} name layers of the tower or the connector; set "
            "enable_tower_connector_lora to have these wrapped"
        )
    if missing:
        suffixes = sorted({name.rpartition(".")[2] for name in candidates})
        raise ModelRefused(
            f"target_modules {missing} name no layer that can be wrapped; "
            f"full names or these suffixes do: {', '.join(suffixes)}"
        )
    every = set().union(*implied.values())
    return {name for name in candidates if _is_named(name, every)}


def _is_named(name: str, targets: Collection[str]) -> bool:
    return any(name == target or name.endswith("." + target) for target in targets)


def _mapped(rows: Mapping[str, RowShapes], seen: Sightings, explicit: bool) -> set[str]:
    """Those layers that saw the rows that they have to; the others stay as they are."""
    unmapped = [name for name, shapes in rows.items() if not seen.saw_all(name, shapes)]
    if unmapped and (explicit or len(unmapped) == len(rows)):
        raise ModelRefused(
            f"layers {unmapped} do not see every token of a batch in its order, so no adapter "
            "can be applied to them; name others as target_modules"
        )
    return set(rows).difference(unmapped)


def _check_targets(targets: Sequence[str] | None, mapped: Collection[str]) -> None:
    """Refuse targets of which no layer could be mapped."""
    unmapped = [
        target
        for target in targets or ()
        if not any(_is_named(name, with_relatives(target)) for name in mapped)
    ]
    if unmapped:
        raise ModelRefused(
            f"target_modules {unmapped} name layers that do not see every image's rows by "
            "themselves, so no adapter can be applied to them; name others"
        )


def _wrap_packed(table: Sequence[Row], layer: PackedLinear) -> BaseLayerWithLoRA:
    wrapper = wrapper_of(layer, table=table)
    if wrapper is None:
        raise TypeError(f"the table has no wrapper for {type(layer).__name__}")
    return wrapper(layer)


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value wherever its key is; a layer with several paths keeps them all."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            model.set_submodule(path, replacements[module])
