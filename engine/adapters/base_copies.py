"""Copies of the base model's weights in an adapter's file: compared by value, never dropped unseen.

PEFT saves embeddings and heads next to an adapter that touches them, and the base layers inside of
its wrappers. If the values are the base's, a copy has no effect. If they are not, it is what the
adapter was trained on, and the loader of PEFT writes it into the base model: the module, and every
module that is tied to it, then has these weights for the rows of the adapter.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.adapters.output_scales import OutputVector
from loradock.engine.adapters.pairs import TensorPair
from loradock.engine.adapters.problems import Problems
from loradock.engine.adapters.target import AdapterTarget, BaseParameter
from loradock.engine.adapters.tensor_names import CopiedParameter
from loradock.engine.adapters.weights import ReadTensors, Tensors, value_range
from loradock.engine.errors import AdapterDoesNotFit, NotFinite
from loradock.engine.layout import SAVED_SUFFIX, ModuleKind

_HALF_DTYPES: Final = {torch.float16, torch.bfloat16}
_SMALLEST_HALF: Final = 2.0**-24
"""The smallest number of float16, to whose multiples its smallest values are rounded."""

_STEP_VALUES: Final = 1 << 19
"""The values that are compared together, while they are in the processor's cache."""


class BaseCopy(NamedTuple):
    """A tensor with the values of the base model's parameter, or with others in their place.

    `base`: the parameter; None if its values can't be read here.
    """

    name: str
    parameter: CopiedParameter
    base: BaseParameter | None


class Comparison:
    """An inspector that compares a tensor with the base model's, and wants it if it differs.

    Values count as equal if they are after rounding to the coarser of both dtypes. float16 and
    bfloat16 both round what the other holds, so there the last digit of bfloat16 may differ.
    """

    def __init__(self, base: BaseParameter | None) -> None:
        self._base = base
        self.differs = base is None
        self.is_finite = True

    def __call__(self, tensor: Tensor) -> bool:
        """Compare the rows that this process has of the base's; without any, all differs."""
        self.is_finite = bool(torch.tensor(value_range(tensor)).isfinite().all())
        if self._base is not None:
            values, _, first = self._base
            self.differs = not are_equal(tensor[first : first + len(values)], values)
        return self.differs


def are_equal(found: Tensor, expected: Tensor) -> bool:
    """Return whether tensors of one shape are equal within the rounding of their dtypes."""
    steps = zip(
        torch.split(found.detach().reshape(-1), _STEP_VALUES),
        torch.split(expected.detach().reshape(-1), _STEP_VALUES),
        strict=True,
    )
    return all(_are_equal(one.cpu(), other.cpu()) for one, other in steps)


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    coarser = max(found.dtype, expected.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    if torch.equal(found.to(coarser), expected.to(coarser)):
        return True
    if {found.dtype, expected.dtype} != _HALF_DTYPES:
        return False
    digit = torch.finfo(torch.bfloat16).eps
    return torch.allclose(found.float(), expected.float(), rtol=digit, atol=_SMALLEST_HALF)


def copies_of(
    copies: Mapping[str, CopiedParameter],
    tensors: Tensors,
    model: AdapterTarget,
    problems: Problems,
) -> list[BaseCopy]:
    """Return the copies of parameters that the model has; add those of other shapes to `problems`.

    A model without the parameter, such as one without a head, is not changed by the copy.
    """
    found = []
    for name, parameter in copies.items():
        if not model.has_parameter(".".join(parameter)):
            continue
        base, tensor = model.base_parameter(*parameter), tensors[name]
        if base is not None and list(tensor.shape) != list(base.shape):
            problems.add(
                AdapterDoesNotFit,
                f"{name} is {list(tensor.shape)}, this model's {list(base.shape)}; an adapter with "
                "additional tokens is served on the model with these tokens alone",
            )
        elif not tensor.dtype.is_floating_point:
            problems.add(
                AdapterDoesNotFit, f"{name} must have a floating dtype, got {tensor.dtype}"
            )
        else:
            found.append(BaseCopy(name, parameter, base))
    return found


class ChangedWeights(NamedTuple):
    """The meaning of copies with other values than the base's.

    `pairs`: the modules that the adapter replaces. `same`: further tensors for one weight, by name,
    with the name of the tensor in `pairs`.
    """

    pairs: list[TensorPair]
    same: dict[str, str]


def changed_weights(
    copies: Collection[BaseCopy],
    differing: Collection[str],
    pairs: Collection[TensorPair],
    vectors: Iterable[OutputVector],
    model: AdapterTarget,
    problems: Problems,
) -> ChangedWeights:
    """Return the modules that have other weights because of the copies in `differing`.

    A module that the adapter replaces anyway (`modules_to_save`) has no use for a copy. Adds the
    copies for modules that can't be replaced to `problems`.
    """
    changed = ChangedWeights([], {})
    replaced = {pair.module for pair in pairs if pair.kind is ModuleKind.HEAD}
    scaled = {vector.pair.module for vector in vectors}
    affected = {copy.parameter.source for copy in copies}
    affected |= set() if affected.isdisjoint(model.tied) else model.tied
    for module in sorted(affected):
        slice_name = module + SAVED_SUFFIX
        weights = [copy.name for copy in copies if _is_weight_of(copy, module, model)]
        biases = [copy.name for copy in copies if copy.parameter == (module, "bias")]
        found = [name for name in (*weights, *biases) if name in differing]
        if not found or replaced & {module, slice_name}:
            continue
        lacks_bias = model.has_parameter(f"{module}.bias") and not biases
        if slice_name not in model.modules or module in scaled or not weights or lacks_bias:
            problems.add(
                AdapterDoesNotFit,
                f"{found[0]} differs from this model's {module}, which can't be replaced here: "
                "that takes a plain layer, whole on one rank, with all its parameters in the file "
                "and no trained magnitude or bias; serve the adapter on the model that it was "
                "trained on",
            )
            continue
        bias = biases[0] if biases else None
        changed.pairs.append(TensorPair(slice_name, weights[0], bias, 1, 1.0, 1.0, ModuleKind.HEAD))
        changed.same.update(dict.fromkeys(weights[1:], weights[0]))
        changed.same.update(dict.fromkeys(biases[1:], biases[0]) if biases else {})
    return changed


def _is_weight_of(copy: BaseCopy, module: str, model: AdapterTarget) -> bool:
    source, field = copy.parameter
    is_tied = source in model.tied and module in model.tied
    return field == "weight" and (source == module or is_tied)


def comparisons_of(copies: Iterable[BaseCopy]) -> dict[str, Comparison]:
    """Return the inspectors that compare copies with the base model, by name."""
    return {copy.name: Comparison(copy.base) for copy in copies}


def differing_copies(comparisons: Mapping[str, Comparison], problems: Problems) -> set[str]:
    """Return the names of copies without the base's values, or for which that is not known.

    Adds copies with NaN or infinity to `problems`, also of modules that the adapter replaces.
    """
    for name, comparison in comparisons.items():
        if not comparison.is_finite:
            problems.add(NotFinite, f"{name} contains NaN or infinity; every value must be finite")
    return {name for name, comparison in comparisons.items() if comparison.differs}


def add_equal_copies(
    copies: Iterable[BaseCopy], names: Collection[str], found: ReadTensors
) -> None:
    """Add the copies in `names` that have the base's values, and so were not read, to `found`."""
    for name, _, base in copies:
        if name in names and name not in found.tensors and base is not None:
            found.tensors[name] = base.values.detach()
            found.ranges[name] = value_range(found.tensors[name])


def check_same(same: Mapping[str, str], found: Mapping[str, Tensor], problems: Problems) -> None:
    """Add tensors that stand for the weight of another with other values; `found` has both."""
    for name, other in same.items():
        # A second name of a tied module stands for the weight of the module that it is tied to.
        if not are_equal(found[name], found[same.get(other, other)]):
            problems.add(
                AdapterDoesNotFit,
                f"{name} and {other} are for one weight and differ; save the adapter again "
                "with one of them",
            )
