"""Pairs of tensors that are one module's A and B, checked against each other and the config.

A pair that exists has the rank that its config specifies. `matching` checks it against the model.

PEFT trains some weights for an embedding and for the modules that are tied to it together. With
`ensure_weight_tying`, a module that is saved whole is saved for all modules of the tie. Rows of
trained tokens (`trainable_token_indices`) of a tied embedding are the head's too, unless the config
has other tokens for it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.problems import Problems, shown
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.tensor_names import PairNames, WeightNames
from loradock.engine.adapters.weights import HasShape, Tensors, ValueRange
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit, NotFinite
from loradock.engine.layout import (
    SAVED_SUFFIX,
    TOKENS_SUFFIX,
    ModuleKind,
    ModuleShape,
    Shard,
)
from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix

_SCALING_MAX: Final = 3.0e38
_SCALING_MIN: Final = 1.2e-38
_TIED_NAMES: Final = ("embed_tokens", "lm_head")
"""The names in `modules_to_save` for which PEFT follows `ensure_weight_tying`."""


class TensorPair(NamedTuple):
    """The names of one module's A `[rank, in]` and B `[out, rank]`, with rank, alpha and scaling.

    For a replaced module, the weight `[out, in]` and the bias `[out]`, None if it has no bias. For
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
        make = _replaced_pair if found.kind is ModuleKind.HEAD else _module_pair
        with problems.collecting():
            pairs.append(make(module, found, tensors, helper))
    return pairs


def _module_pair(module: str, names: PairNames, tensors: Tensors, helper: PEFTHelper) -> TensorPair:
    key = helper.key_of(names.source)
    found = {name: tensors[name] for name in (names.a, names.b) if name is not None}
    if any(len(tensor.shape) > 2 for tensor in found.values()):
        found = _as_matrices(module, names, found, helper.of_module(key).rank)
    return make_pair(module, names, found, helper, key)


class _Matrix(NamedTuple):
    """The shape of a convolution's tensor as a matrix."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _as_matrices(module: str, names: PairNames, tensors: Tensors, rank: int) -> dict[str, HasShape]:
    """Return the shapes of A `[rank, in, *kernel]` and B `[out, rank, 1, ...]` as matrices.

    The kernel has one to three sizes; `size_difference` compares it with the model's. Refuses other
    tensors of more than two dimensions, as of experts, and convolutions with groups.
    """
    found = {name: _as_matrix(tensor) for name, tensor in tensors.items()}
    if names.b is not None and len(tensors[names.b].shape) > 2:
        columns = found[names.b].shape[1]
        if columns < rank and rank % columns == 0:
            raise AdapterDoesNotFit(
                f"{module} has rank {rank} and a B of {columns} columns, as a convolution of "
                f"{rank // columns} groups; A and B are stored whole, so it is not served"
            )
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    a, b = shapes.get(names.a or "", [rank]), shapes.get(names.b or "", [0, rank])
    if a[:1] != [rank] or b[1:2] != [rank]:
        raise AdapterDoesNotFit(
            f"{module} has A {a} and B {b}; the config specifies rank {rank}, and only a "
            "convolution's A [rank, in, ...] and B [out, rank, ...] have more than two dimensions"
        )
    return found


def _as_matrix(tensor: HasShape) -> HasShape:
    first, *others = tensor.shape or (0,)
    return _Matrix(tensor.dtype, (first, math.prod(others))) if 2 <= len(others) <= 4 else tensor


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
    rank, alpha, scaling = helper.of_module(key)
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
    """Return how a pair's sizes differ from those of its module; empty if they don't."""
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


def _replaced_pair(
    module: str, names: PairNames, tensors: Tensors, _helper: PEFTHelper
) -> TensorPair:
    if names.a is None:
        raise AdapterDoesNotFit(f"{module} has a saved bias but no weight; both are needed")
    # A norm has one value per feature, a linear layer or an embedding a matrix.
    dimensions = 1 if len(tensors[names.a].shape) == 1 else 2
    weight = _floating_shape(names.a, tensors[names.a], dimensions)
    bias = weight[:1] if names.b is None else _floating_shape(names.b, tensors[names.b], 1)
    if bias != weight[:1]:
        raise AdapterDoesNotFit(
            f"{module} has a weight {weight} and a bias {bias}; they must have equal outputs"
        )
    return TensorPair(module, names.a, names.b, 1, 1.0, 1.0, names.kind)


def _floating_shape(name: str, tensor: HasShape, dimensions: int) -> list[int]:
    if not tensor.dtype.is_floating_point:
        raise AdapterDoesNotFit(f"{name} must have a floating dtype, got {tensor.dtype}")
    if len(tensor.shape) != dimensions:
        count = "two dimensions are" if dimensions == 2 else "one dimension is"
        raise AdapterDoesNotFit(f"{name} is {list(tensor.shape)}; {count} needed")
    return list(tensor.shape)


class TiedPairs(NamedTuple):
    """Pairs of modules, and tensors that stand for the weight of another one by name."""

    pairs: list[TensorPair]
    same: dict[str, str]


def saved_names(helper: PEFTHelper, model: AdapterTarget | None) -> tuple[str, ...]:
    """Return the names of the modules that an adapter saves whole, with those that are tied."""
    tied = frozenset() if model is None or not _ties_saved(helper) else model.tied
    return (*helper.modules_to_save, *sorted(tied))


def _ties_saved(helper: PEFTHelper) -> bool:
    """Return whether PEFT ties what is saved: it looks for the names of an embedding in the config.

    Of a file that was tied under other names, the head's weight is a changed copy of the base's.
    """
    ends = {name.rpartition(".")[2] for name in helper.modules_to_save}
    return helper.ensure_weight_tying and not ends.isdisjoint(_TIED_NAMES)


def tie_saved(pairs: Sequence[TensorPair], helper: PEFTHelper, model: AdapterTarget) -> TiedPairs:
    """Return the pairs with one weight for all modules of the tie, if the config ties them.

    PEFT's tied heads have no bias.
    """
    tied = {module + SAVED_SUFFIX: module for module in model.tied}
    own = {tied[p.module]: p for p in pairs if p.module in tied}
    others = [pair for pair in pairs if pair.module not in tied]
    if not _ties_saved(helper) or not own:
        return TiedPairs(list(pairs), {})
    first = own.get(model.token_embedding, next(iter(own.values())))
    shared = [first._replace(module=name, b=None) for name in tied]
    same = {pair.a: first.a for pair in own.values() if pair.a != first.a}
    return TiedPairs(others + shared, same)


def token_pairs(
    names: Mapping[str, PairNames],
    taken: Collection[str],
    tensors: Tensors,
    helper: PEFTHelper,
    model: AdapterTarget,
    problems: Problems,
) -> TiedPairs:
    """Return the rows of trained tokens, by module; `taken`: modules that are adapted otherwise.

    Adds rows without tokens, tokens without rows, and modules with both to `problems`.
    """
    found: dict[str, TensorPair] = {}
    same: dict[str, str] = {}
    for module, one in names.items():
        with problems.collecting():
            found[module] = _token_pair(module, one, tensors, helper)
    embedding = found.get(model.token_embedding)
    for module in sorted(model.tied if embedding is not None else ()):
        ids = helper.trained_tokens_of(module)
        if embedding is not None and ids in (None, embedding.token_ids):
            other = found.get(module, embedding)
            if other.a != embedding.a:
                same[other.a] = embedding.a
            found[module] = embedding._replace(module=module + TOKENS_SUFFIX)
        elif helper.ensure_weight_tying:
            problems.add(
                AdapterConfigRefused,
                f"trainable_token_indices has other tokens for {module} than for "
                f"{model.token_embedding}, to which ensure_weight_tying ties it",
            )
    both = sorted(found.keys() & set(taken))
    text = "trained tokens of modules that are adapted or replaced too"
    problems.add_each(AdapterDoesNotFit, text, both)
    missing = [end for end in helper.token_indices if not any(m.endswith(end) for m in found)]
    text = "trainable_token_indices names these modules, but no tensor belongs to them"
    problems.add_each(AdapterDoesNotFit, text, [shown(end) for end in missing])
    return TiedPairs(list(found.values()), same)


def _token_pair(module: str, names: PairNames, tensors: Tensors, helper: PEFTHelper) -> TensorPair:
    name, ids = names.a or "", helper.trained_tokens_of(names.source)
    if ids is None:
        raise AdapterDoesNotFit(f"{name} has trained rows; trainable_token_indices has no tokens")
    shape, dtype = list(tensors[name].shape), tensors[name].dtype
    if len(shape) != 2 or shape[0] != len(ids) or not dtype.is_floating_point:
        raise AdapterDoesNotFit(
            f"{name} is {dtype} {shape}; one floating row for each of {len(ids)} tokens of "
            "trainable_token_indices is needed"
        )
    slice_name = module + TOKENS_SUFFIX
    return TensorPair(slice_name, name, None, len(ids), 1.0, 1.0, ModuleKind.TOKENS, ids)


def check_values(
    pairs: Sequence[TensorPair],
    ranges: Mapping[str, ValueRange],
    dtype: torch.dtype,
    problems: Problems,
) -> None:
    """Add every tensor with a value that is not finite, or would not be in `dtype`.

    Scaling and rounding are monotonic, so a tensor's smallest and largest value stand for all
    values between them.
    """
    named = [factor for pair in pairs for factor in pair.factors().items()]
    stored = torch.tensor([ranges[name] for name, _ in named], dtype=torch.float64)
    scaling = torch.tensor([scaling for _, scaling in named], dtype=torch.float32)
    kept = (stored.float() * scaling[:, None]).to(dtype)
    for index in (~kept.isfinite().all(1)).nonzero().flatten().tolist():
        name, factor = named[index]
        low, high = ranges[name]
        if stored[index].isfinite().all():
            values = f"{name} has values from {low:g} to {high:g}"
            text = f"{values}; times {factor:g} they are too large for {dtype}"
        else:
            text = f"{name} contains NaN or infinity; every value must be finite"
        problems.add(NotFinite, text)
