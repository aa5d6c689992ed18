"""Copies of the base model's weights in an adapter's file: compared by value, never dropped unseen.

PEFT saves embeddings and heads next to an adapter that touches them, and the base layers inside of
its wrappers. Where the values are the base's, a copy has no effect. Where they are not, it is what
the adapter was trained on, and the loader of PEFT writes it into the base model: the module, and
every module that is tied to it, then has these weights for the rows of the adapter.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from loradock.engine.adapters.files.problems import Problems
from loradock.engine.adapters.files.weights_file import (
    NO_VISITORS,
    ReadTensors,
    Tensors,
    Visitors,
    Wanted,
)
from loradock.engine.adapters.output_vectors import OutputVector
from loradock.engine.adapters.pairs import TensorPair
from loradock.engine.adapters.tensor_names import CopiedParameter
from loradock.engine.errors import AdapterDoesNotFit, NotFinite
from loradock.engine.layout import SAVED_SUFFIX, ModuleKind, ModuleShape
from loradock.engine.submatrix import WHOLE_TENSOR

_HALF_DTYPES: Final = {torch.float16, torch.bfloat16}
_SMALLEST_HALF: Final = 2.0**-24
"""The smallest number of float16, to whose multiples its smallest values are rounded."""


class HeldWeight(NamedTuple):
    """A parameter of the base model, as far as this process has it.

    `values`: whole rows, from `first_row` of the whole parameter on. `shape`: of all of it.
    """

    values: Tensor
    shape: tuple[int, ...]
    first_row: int = 0


class CopyTarget(Protocol):
    """The model that copies are compared with."""

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """Its module-slices by path."""
        ...

    @property
    def tied(self) -> frozenset[str]:
        """The modules that share the token embedding's weight, itself included."""
        ...

    @property
    def has_parameter(self) -> Callable[[str], bool]:
        """Whether it has a parameter."""
        ...

    @property
    def held(self) -> Callable[[str, str], HeldWeight | None]:
        """Returns a module's parameter; None where its values can't be read."""
        ...


class BaseCopy(NamedTuple):
    """A tensor with the values of the base model's parameter, or with others in their place.

    `held` None: the base's values can't be read here.
    """

    name: str
    parameter: CopiedParameter
    held: HeldWeight | None


class Comparison:
    """A visitor that compares a tensor with values that it should have.

    Values count as equal if they are after rounding to the coarser of both dtypes. float16 and
    bfloat16 both round what the other holds, so there the last digit of bfloat16 may differ.
    """

    def __init__(self, held: HeldWeight) -> None:
        row_size = math.prod(held.shape[1:])
        self._expected = held.values.detach().reshape(-1)
        self._first = held.first_row * row_size
        self.differs = False
        self.is_finite = True

    def __call__(self, values: Tensor, start: int) -> None:
        """Compare the part of the values, flat from `start` on, that the other side has."""
        wide = values.float() if values.dtype.itemsize == 1 else values
        self.is_finite = self.is_finite and bool(torch.isfinite(wide).all())
        low = max(start, self._first)
        high = min(start + len(values), self._first + len(self._expected))
        if low < high and not self.differs:
            expected = self._expected[low - self._first : high - self._first].cpu()
            self.differs = not _are_equal(values[low - start : high - start], expected)


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    coarser = max(found.dtype, expected.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    if torch.equal(found.to(coarser), expected.to(coarser)):
        return True
    if {found.dtype, expected.dtype} != _HALF_DTYPES:
        return False
    digit = torch.finfo(torch.bfloat16).eps
    return torch.allclose(found.float(), expected.float(), rtol=digit, atol=_SMALLEST_HALF)


def copies_of(
    copies: Mapping[str, CopiedParameter], tensors: Tensors, model: CopyTarget, problems: Problems
) -> list[BaseCopy]:
    """Return the copies of parameters that the model has; add those of other shapes to `problems`.

    A model without the parameter, such as one without a head, is not changed by the copy.
    """
    found = []
    for name, parameter in copies.items():
        if not model.has_parameter(".".join(parameter)):
            continue
        held, tensor = model.held(*parameter), tensors[name]
        if held is not None and list(tensor.shape) != list(held.shape):
            problems.add(
                AdapterDoesNotFit,
                f"{name} is {list(tensor.shape)}, this model's {list(held.shape)}; an adapter with "
                "additional tokens is served on the model with these tokens alone",
            )
        elif not tensor.dtype.is_floating_point:
            problems.add(AdapterDoesNotFit, f"{name} is {tensor.dtype}; a floating one is needed")
        else:
            found.append(BaseCopy(name, parameter, held))
    return found


class ChangedWeights(NamedTuple):
    """What copies with other values than the base's mean for the adapter.

    `pairs`: the modules that it replaces. `same`: further tensors for one weight, by name, with the
    name of the one in `pairs`.
    """

    pairs: list[TensorPair]
    same: dict[str, str]


def changed_weights(
    copies: Collection[BaseCopy],
    differing: Collection[str],
    pairs: Collection[TensorPair],
    vectors: Iterable[OutputVector],
    model: CopyTarget,
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


def _is_weight_of(copy: BaseCopy, module: str, model: CopyTarget) -> bool:
    source, field = copy.parameter
    is_tied = source in model.tied and module in model.tied
    return field == "weight" and (source == module or is_tied)


def comparisons_of(copies: Iterable[BaseCopy]) -> dict[str, Comparison]:
    """Return the visitors that compare copies with the base model, by name."""
    return {copy.name: Comparison(copy.held) for copy in copies if copy.held is not None}


def differing_copies(
    copies: Iterable[BaseCopy], comparisons: Mapping[str, Comparison], problems: Problems
) -> set[str]:
    """Return the names of copies without the base's values, or for which that is not known.

    Adds copies with NaN or infinity to `problems`, also of modules that the adapter replaces.
    """
    for name, one in comparisons.items():
        if not one.is_finite:
            problems.add(NotFinite, f"{name} contains NaN or infinity; every value must be finite")
    return {
        copy.name
        for copy in copies
        if copy.name not in comparisons or comparisons[copy.name].differs
    }


class Reader(Protocol):
    """What reads the tensors of a file."""

    def read(
        self, wanted: Wanted, *, is_checked: bool = False, visitors: Visitors = NO_VISITORS
    ) -> ReadTensors:
        """Return the wanted parts, and visit others."""
        ...


def check_same(
    same: Mapping[str, str], found: Mapping[str, Tensor], reader: Reader, problems: Problems
) -> None:
    """Add tensors that stand for the weight of another, which is in `found`, with other values."""
    comparisons = {}
    for name, other in same.items():
        # A second name of a tied module stands for the weight of the module that it is tied to.
        kept = found[same.get(other, other)]
        comparisons[name] = Comparison(HeldWeight(kept, tuple(kept.shape)))
    if comparisons:
        reader.read({}, is_checked=True, visitors=comparisons)
    for name, one in comparisons.items():
        if one.differs:
            problems.add(
                AdapterDoesNotFit,
                f"{name} and {same[name]} are for one weight and differ; save the adapter again "
                "with one of them",
            )


def read_more(reader: Reader, pairs: Iterable[TensorPair], found: ReadTensors) -> None:
    """Read the tensors of further pairs whole, and add them to `found`."""
    names = {name for pair in pairs for name in pair.factors()} - found.tensors.keys()
    if names:
        more = reader.read(dict.fromkeys(sorted(names), WHOLE_TENSOR))
        found.tensors.update(more.tensors)
        found.ranges.update(more.ranges)
