"""Pairs of tensors that are one module's A and B, checked against each other and the config.

A pair that exists has the rank that its config specifies. `compatibility` checks it against the
model.
"""

import math
from typing import Final, NamedTuple

import torch

from loradock.engine.adapters.files.problems import Problems
from loradock.engine.adapters.files.weights_file import HasShape, Tensors
from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.tensor_names import PairNames, WeightNames
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from loradock.engine.layout import SAVED_SUFFIX, ModuleKind, ModuleShape, Shard
from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix

_SCALING_MAX: Final = 3.0e38
_SCALING_MIN: Final = 1.2e-38


class TensorPair(NamedTuple):
    """The names of one module's A `[rank, in]` and B `[out, rank]`, with rank, alpha and scaling.

    For a head they are the weight `[out, in]` and the bias `[out]`, None if it has no bias. For
    trained tokens `a` is their rows `[tokens, in]`, `rank` their number and `token_ids` their ids.
    """

    module: str
    a: str
    b: str | None
    rank: int
    alpha: float
    scaling: float
    kind: ModuleKind = ModuleKind.LINEAR
    token_ids: tuple[int, ...] = ()

    def factors(self) -> dict[str, float]:
        """Return its tensors, with the factor by which each is multiplied before rounding."""
        return {self.a: 1.0} | ({} if self.b is None else {self.b: self.scaling})

    def submatrices(self, shard: Shard) -> dict[str, Submatrix]:
        """Return its tensors, with the part of each that a process with this shard keeps."""
        if self.kind in (ModuleKind.HEAD, ModuleKind.TOKENS):
            return dict.fromkeys(self.factors(), WHOLE_TENSOR)
        parts = (shard.a_submatrix(self.rank), shard.b_submatrix())
        return dict(zip(self.factors(), parts, strict=True))


def pair_up(
    names: WeightNames, tensors: Tensors, helper: PEFTHelper, problems: Problems
) -> list[TensorPair]:
    """Return the modules whose A and B are present and agree with each other and the config."""
    pairs: list[TensorPair] = []
    for module, found in names.pairs.items():
        make = _head_pair if found.kind is ModuleKind.HEAD else _module_pair
        with problems.collecting():
            pairs.append(make(module, found, tensors, helper))
    return pairs


class _Flat(NamedTuple):
    """The shape of a convolution's tensor as a matrix."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _module_pair(module: str, names: PairNames, tensors: Tensors, helper: PEFTHelper) -> TensorPair:
    found = {name: _flat(tensors[name]) for name in (names.a, names.b) if name is not None}
    key = helper.key_of(names.source)
    if names.b is not None and len(tensors[names.b].shape) > 2:
        columns, rank = found[names.b].shape[1], helper.rank_of(key)
        if columns < rank and rank % columns == 0:
            raise AdapterDoesNotFit(
                f"{module} has rank {rank} and a B of {columns} columns, as a convolution of "
                f"{rank // columns} groups; A and B are stored whole, so it is not served"
            )
    _check_kernel_ranks(module, names, tensors, helper.rank_of(key))
    return make_pair(module, names, found, helper, key)


def _check_kernel_ranks(module: str, names: PairNames, tensors: Tensors, rank: int) -> None:
    """Refuse tensors of more than two dimensions that are no convolution's, as of experts."""
    shapes = {name: list(tensors[name].shape) for name in (names.a, names.b) if name is not None}
    a, b = shapes.get(names.a or "", [rank]), shapes.get(names.b or "", [0, rank])
    if max(map(len, (a, b))) > 2 and (a[:1] != [rank] or b[1:2] != [rank]):
        raise AdapterDoesNotFit(
            f"{module} has A {a} and B {b}; the config specifies rank {rank}, and only a "
            "convolution's A [rank, in, ...] and B [out, rank, ...] have more than two dimensions"
        )


def _flat(tensor: HasShape) -> HasShape:
    """Return the shape of A `[rank, in, *kernel]` or B `[out, rank, 1, ...]` as that of a matrix.

    The kernel has one to three sizes; `size_difference` compares it with the model's.
    """
    first, *others = tensor.shape or (0,)
    return _Flat(tensor.dtype, (first, math.prod(others))) if 2 <= len(others) <= 4 else tensor


def make_pair(
    module: str,
    names: PairNames,
    tensors: Tensors,
    helper: PEFTHelper,
    key: str,
    experts: int = 1,
) -> TensorPair:
    """Return a module's A and B, checked against each other and the config's values for `key`.

    Fused tensors have the rank once per expert. Raises `AdapterDoesNotFit`, and
    `AdapterConfigRefused` for a scaling outside the range of float32.
    """
    if names.a is None or names.b is None:
        present, missing = (names.a, "B") if names.b is None else (names.b, "A")
        raise AdapterDoesNotFit(f"{present} has no matching lora_{missing}; both are needed")
    rank, alpha, scaling = helper.rank_of(key), helper.alpha_of(key), helper.scaling_of(key)
    a, b = (_floating_shape(name, tensors[name], 2) for name in (names.a, names.b))
    if a[0] != rank * experts or b[1] != rank * experts:
        each = f" for each of {experts} experts" if experts > 1 else ""
        raise AdapterDoesNotFit(
            f"{module} has A {a} and B {b}; the config specifies rank {rank}{each}"
        )
    if not _SCALING_MIN <= abs(scaling) <= _SCALING_MAX:
        raise AdapterConfigRefused(
            f"{module} has alpha {alpha} and rank {rank}, so its scaling is {scaling}; it "
            "must be in the range of float32"
        )
    return TensorPair(module, names.a, names.b, rank, alpha, scaling, names.kind)


def size_difference(pair: TensorPair, shape: ModuleShape, tensors: Tensors) -> str:
    """Return how a pair's sizes differ from those of its module; empty where they don't."""
    a = list(tensors[pair.a].shape)
    expected = f"in this model it has {shape.in_features} inputs and {shape.out_features} outputs"
    if pair.kind is ModuleKind.HEAD:
        found = a if len(a) > 1 else [*a, 1]
        is_same = found == [shape.out_features, shape.in_features]
        name = pair.module.removesuffix(SAVED_SUFFIX)
        return "" if is_same else f"{name} has a weight {a}; {expected}"
    if pair.kind is ModuleKind.TOKENS:
        return _token_difference(pair, shape, a)
    b = [] if pair.b is None else list(tensors[pair.b].shape)
    is_same = (len(a), a[1:], b[0]) == (len(b), shape.input_sizes, shape.out_features)
    return "" if is_same else f"{pair.module} has A {a} and B {b}; {expected}"


def _token_difference(pair: TensorPair, shape: ModuleShape, rows: list[int]) -> str:
    beyond = [one for one in pair.token_ids if one >= shape.out_features]
    if beyond:
        return f"{pair.a} has rows of tokens {beyond[:4]}; this model has {shape.out_features}"
    is_same = rows[1:] == [shape.in_features]
    return "" if is_same else f"{pair.a} is {rows}; in this model a row has {shape.in_features}"


def check_rank_divisible(module: str, rank: int, shard: Shard) -> None:
    """Raise `AdapterDoesNotFit` unless the module's processes can divide this rank."""
    if rank % shard.rank_parts:
        raise AdapterDoesNotFit(
            f"{module} has rank {rank}, which {shard.rank_parts} ranks can't share evenly; use a "
            f"rank that {shard.rank_parts} divides, or serve without fully_sharded_loras"
        )


def _head_pair(module: str, names: PairNames, tensors: Tensors, _helper: PEFTHelper) -> TensorPair:
    if names.a is None:
        raise AdapterDoesNotFit(f"{module} has a saved bias but no weight; both are needed")
    # A norm has one value per feature, a linear layer or an embedding a matrix.
    dimensions = 1 if len(tensors[names.a].shape) == 1 else 2
    weight = _floating_shape(names.a, tensors[names.a], dimensions)
    bias = weight[:1] if names.b is None else _floating_shape(names.b, tensors[names.b], 1)
    if bias != weight[:1]:
        raise AdapterDoesNotFit(
            f"{module} has a weight {weight} and a bias {bias}; one value for each label is needed"
        )
    return TensorPair(module, names.a, names.b, 1, 1.0, 1.0, names.kind)


def _floating_shape(name: str, tensor: HasShape, dimensions: int) -> list[int]:
    if not tensor.dtype.is_floating_point:
        raise AdapterDoesNotFit(f"{name} is {tensor.dtype}; a floating dtype is needed")
    if len(tensor.shape) != dimensions:
        count = "two dimensions are" if dimensions == 2 else "one dimension is"
        raise AdapterDoesNotFit(f"{name} is {list(tensor.shape)}; {count} needed")
    return list(tensor.shape)
