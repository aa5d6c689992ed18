"""The modules and parameters that a config adapts, and those that its file has no tensors for.

PEFT adapts every module whose path is, or ends in, one of `target_modules`, unless another field
leaves it out, and every parameter that `target_parameters` names in the same way. A file without
tensors for one of the names is refused. A file without tensors for some of a name's layers is
served with a warning: it can be a part of several, or all that was trained.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.problems import Problems, listed, shown
from loradock.engine.adapters.target import AdapterTarget, suffixes
from loradock.engine.errors import AdapterDoesNotFit, bounded_details
from loradock.engine.layout import ModuleKind, ModuleShape

_IN_LAYER: Final = re.compile(r"(.*?)\.(\d+)\.(.+)\Z")
"""A path's list of layers, its layer and the module in it."""


class _Target(NamedTuple):
    """A module or parameter that a config adapts, the name that means it, and what it is.

    `is_touched`: the file has tensors for it.
    """

    path: str
    name: str
    is_touched: bool
    is_expert: bool


def check_targets(
    touched: Collection[str],
    helper: PEFTHelper,
    model: AdapterTarget,
    problems: Problems,
    *,
    has_single_experts: bool = False,
) -> tuple[str, ...]:
    """Add targets without any tensor to `problems`; return warnings about layers without tensors.

    `touched`: every module-slice that the file has tensors for. `has_single_experts`: it has
    tensors per expert. Without them, a name in `target_modules` need not mean experts: if their
    weights are fused, PEFT adapts them by `target_parameters` alone.
    """
    parameters = list(_targeted_parameters(touched, helper, model))
    _check_parameters(parameters, helper, model, problems)
    modules = list(_targeted_modules(touched, helper, model))
    needed = [one for one in modules if has_single_experts or not one.is_expert]
    present = {one.name for one in needed if one.is_touched}
    absent = sorted({one.name for one in needed} - present)
    problems.add_each(AdapterDoesNotFit, "target_modules without a tensor", [*map(shown, absent)])
    # One path may be the target of several names, and the parameter of several slices.
    is_touched: dict[str, bool] = {}
    for one in (*parameters, *modules):
        is_touched[one.path] = is_touched.get(one.path, False) or one.is_touched
    return _warnings(is_touched)


def _targeted_modules(
    touched: Collection[str], helper: PEFTHelper, model: AdapterTarget
) -> Iterator[_Target]:
    """Yield each module that `target_modules` names; none if patterns decide, which are not run."""
    if isinstance(helper.target_modules, str) or not helper.selects_by_names:
        return
    names = frozenset(helper.target_modules)
    for shape in _candidates(touched, model):
        is_expert, path = shape.kind is ModuleKind.EXPERTS, shape.name
        if is_expert:
            # The path in models whose experts are modules; any expert means all of them.
            path = ".0.".join(path.rsplit(".", 1))
        if not _is_excluded(helper, path):
            # A parameter may have a slice for all of it, which an adapter fills instead of parts.
            is_touched = shape.name in touched or shape.parameter in touched
            for name in suffixes([path]) & names:
                # A whole path means its module in PEFT, also outside the chosen layers.
                if name == path or _is_in_chosen_layer(helper, path):
                    yield _Target(shape.name, name, is_touched, is_expert)


def _targeted_parameters(
    touched: Collection[str], helper: PEFTHelper, model: AdapterTarget
) -> Iterator[_Target]:
    """Yield each parameter that `target_parameters` names, once per slice."""
    names = frozenset(helper.target_parameters)
    if not names:
        return
    adapted = {model.modules[name].parameter for name in touched if name in model.modules}
    for shape in _candidates(touched, model):
        path = shape.parameter
        for name in suffixes([path]) & names:
            yield _Target(path, name, path in adapted, shape.kind is ModuleKind.EXPERTS)


def _candidates(touched: Collection[str], model: AdapterTarget) -> Iterator[ModuleShape]:
    """Yield the slices that may be targets.

    An adapter that touches no image layer was trained on a text model, so layers of a tower with
    the same names are not targets.
    """
    has_images = not model.image_layers.isdisjoint(touched)
    for name, shape in model.modules.items():
        is_replaced_whole = shape.is_optional or shape.kind is ModuleKind.HEAD
        if not is_replaced_whole and (has_images or name not in model.image_layers):
            yield shape


def _is_excluded(helper: PEFTHelper, path: str) -> bool:
    """Return whether a module is excluded, or within a module that is saved whole."""
    if not suffixes([path]).isdisjoint(helper.exclude_modules):
        return True
    parts = path.split(".")
    parents = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return not suffixes(parents).isdisjoint(helper.modules_to_save)


def _is_in_chosen_layer(helper: PEFTHelper, path: str) -> bool:
    layers = helper.layers_to_transform
    return layers is None or layer_of(path, helper.layers_pattern) in layers


def layer_of(path: str, lists: Sequence[str]) -> int | None:
    """Return the index of the layer that a module is in; None for a module outside the layers.

    `lists`: names of lists of layers, of which the first in the path counts. Without any, the
    first number counts that has two names or more before it.
    """
    parts = path.split(".")
    found: dict[str, int] = {}
    for at in (at for at in range(1, len(parts) - 1) if parts[at].isdecimal()):
        if not lists and at > 1:
            return int(parts[at])
        for name in suffixes([".".join(parts[:at])]):
            found.setdefault(name, int(parts[at]))
    return next((found[name] for name in lists if name in found), None)


def _check_parameters(
    targets: Collection[_Target], helper: PEFTHelper, model: AdapterTarget, problems: Problems
) -> None:
    """Add parameters of this model that the file has no tensors for at all."""
    found = {one.name for one in targets}
    adapted = {one.name for one in targets if one.is_touched}
    for name in helper.target_parameters:
        if name not in adapted and model.has_parameter(name):
            why = "no tensor is for it" if name in found else "it is not wrapped in this model"
            problems.add(AdapterDoesNotFit, f"target_parameters names {shown(name)}; {why}")


def _warnings(is_touched: Mapping[str, bool]) -> tuple[str, ...]:
    """Return one line for all targets that are missing in the same layers; by target."""
    missing = [path for path, has_tensors in is_touched.items() if not has_tensors]
    lines = [
        f"no tensors for {listed(modules)}{f' of {place}' if place else ''}, although the config "
        f"names them; of {len(is_touched)} targets, {len(missing)} stay as in the base model"
        for place, modules in _by_layers(missing).items()
    ]
    return bounded_details(lines)


def _by_layers(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules in layers by the layers, such as `model.layers.2, 4-7`.

    A path without a layer is under the empty name.
    """
    layers: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        match = _IN_LAYER.match(path)
        key, index = ((match[1], match[3]), int(match[2])) if match else (("", path), 0)
        layers.setdefault(key, []).append(index)
    found: dict[str, list[str]] = {}
    for (before, module), indices in layers.items():
        place = f"{before}.{_runs(sorted(indices))}" if before else ""
        found.setdefault(place, []).append(module)
    return found


def _runs(numbers: Sequence[int]) -> str:
    """Return sorted numbers as runs: "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return listed(["-".join(map(str, run)) for run in runs])
