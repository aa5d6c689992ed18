"""The walk over a model that decides, layer by layer, what is wrapped and what is packed.

What it is: candidates from the table of wrappers, the targets among them, the probe's word on each,
and the exchange. What it is not: the table (`engine.layers`), the families (`engine.packing`) or
the probe. One rule: a layer is wrapped only if it was seen to do what its wrapper assumes.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from engine.errors import ModelRefused
from engine.layers import WRAPPERS, BaseLayerWithLoRA, Role, Row, wrapper_of
from engine.layers.packed import PackedLinear
from engine.layout import ModuleShape, directory_columns
from engine.packing import find_groups, pack, with_relatives
from engine.probe import SAMPLED_ROWS, RowShapes, Sightings, Trial, watch_layers

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


def prepare_layers(
    model: PreTrainedModel,
    trial: Trial,
    vocab_size: int,
    targets: Sequence[str] | None,
    table: Sequence[Row] = WRAPPERS,
) -> dict[str, BaseLayerWithLoRA]:
    """Wrap the model's layers in place, packed where that can be; wrappers by their path.

    With `targets`, only layers that they name; `table` says what wraps what. A layer that is
    reachable by several paths is wrapped once, under its first. Raises `ModelRefused` for a model
    without a layer to wrap, a target that names none, and a model that can't be batched.
    """
    candidates = find_candidates(model, table)
    if not candidates:
        raise ModelRefused("the model has no layer of a kind that can be wrapped")
    named = _targeted(candidates, targets)
    groups = find_groups(model, named)
    siblings = [child for group in groups for child in group.children]
    layers = {name: candidates[name].layer for name in named}
    seen = watch_layers(trial, layers, vocab_size, siblings)
    rows = {name: _ROWS.get(candidates[name].role, trial.rows) for name in named}
    mapped = _mapped(rows, seen, explicit=targets is not None)
    packed = [
        group
        for group in groups
        if mapped.issuperset(group.children) and seen.share_inputs(group.children)
    ]
    wrap = partial(_wrap_packed, table)
    wrapped = {group.name: pack(model, group, wrap) for group in packed}
    alone = mapped.difference(child for group in packed for child in group.children)
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


def _targeted(candidates: Collection[str], targets: Sequence[str] | None) -> list[str]:
    """The candidates that `targets` name; a packed parent and its children imply each other."""
    if targets is None:
        return list(candidates)
    implied = {target: with_relatives(target) for target in targets}
    missing = [t for t in targets if not any(_is_named(name, implied[t]) for name in candidates)]
    if missing:
        suffixes = sorted({name.rpartition(".")[2] for name in candidates})
        raise ModelRefused(
            f"target_modules {missing} name no layer that can be wrapped; "
            f"full names or these suffixes do: {', '.join(suffixes)}"
        )
    every = set().union(*implied.values())
    return [name for name in candidates if _is_named(name, every)]


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
