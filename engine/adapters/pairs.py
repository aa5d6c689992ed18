"""Which tensors make one module's weights, and whether they agree with each other and the config.

What it is: names and shapes put together. What it is not: the model, which `engine.fitting` holds
them against, or values. One rule: a pair that exists has the rank that its config gives it.
"""

from typing import Final, NamedTuple

from engine.adapters.files.problems import Problems
from engine.adapters.files.weights_file import HasShape, Tensors
from engine.adapters.peft_config import PEFTHelper
from engine.adapters.tensor_names import PairNames, WeightNames
from engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from engine.layout import ModuleKind, Shard
from engine.submatrix import ALL, Part

_SCALING_MAX: Final = 3.0e38
_SCALING_MIN: Final = 1.2e-38


class Pair(NamedTuple):
    """One module's A `[rank, in]` and B `[out, rank]`, by name, and what multiplies them.

    Of a head they are the weight `[out, in]` and the bias `[out]`, None where it has none.
    """

    module: str
    a: str
    b: str | None
    rank: int
    alpha: float
    scaling: float
    kind: ModuleKind = ModuleKind.LINEAR

    def factors(self) -> dict[str, float]:
        """Its tensors, and what each is multiplied by before it is rounded."""
        return {self.a: 1.0} | ({} if self.b is None else {self.b: self.scaling})

    def parts(self, shard: Shard) -> dict[str, Part]:
        """Its tensors, and what a process with this shard keeps of each."""
        if self.kind is ModuleKind.HEAD:
            return dict.fromkeys(self.factors(), ALL)
        parts = (shard.a_part(self.rank), shard.b_part())
        return dict(zip(self.factors(), parts, strict=True))


def pair_up(
    names: WeightNames, tensors: Tensors, helper: PEFTHelper, problems: Problems
) -> list[Pair]:
    """The modules whose A and B are there and agree with each other and with the config."""
    pairs: list[Pair] = []
    for module, found in names.pairs.items():
        make = _head if found.kind is ModuleKind.HEAD else _pair
        with problems.collecting():
            pairs.append(make(module, found, tensors, helper))
    return pairs


def _pair(module: str, names: PairNames, tensors: Tensors, helper: PEFTHelper) -> Pair:
    return pair_of(module, names, tensors, helper, helper.key_of(names.source))


def pair_of(
    module: str,
    names: PairNames,
    tensors: Tensors,
    helper: PEFTHelper,
    key: str,
    experts: int = 1,
) -> Pair:
    """A module's A and B, which must agree with each other and with what the config says of `key`.

    Fused tensors have the rank once for each of `experts`. Raises `AdapterDoesNotFit`, and
    `AdapterConfigRefused` for a scaling that can't be held.
    """
    if names.a is None or names.b is None:
        there, missing = (names.a, "B") if names.b is None else (names.b, "A")
        raise AdapterDoesNotFit(f"{there} has no lora_{missing} beside it; both are needed")
    rank, alpha, scaling = helper.rank_of(key), helper.alpha_of(key), helper.scaling_of(key)
    a, b = (_shape(name, tensors[name], 2) for name in (names.a, names.b))
    if a[0] != rank * experts or b[1] != rank * experts:
        each = f" for each of {experts} experts" if experts > 1 else ""
        raise AdapterDoesNotFit(
            f"{module} has A {a} and B {b}; the config gives it rank {rank}{each}"
        )
    if not _SCALING_MIN <= abs(scaling) <= _SCALING_MAX:
        raise AdapterConfigRefused(
            f"{module} has alpha {alpha} and rank {rank}, a scaling of {scaling}; one that float32 "
            "can hold is needed"
        )
    return Pair(module, names.a, names.b, rank, alpha, scaling, names.kind)


def check_shared(module: str, rank: int, shard: Shard) -> None:
    """Raise `AdapterDoesNotFit` unless the processes that share the module can share this rank."""
    if rank % shard.rank_parts:
        raise AdapterDoesNotFit(
            f"{module} has rank {rank}, which {shard.rank_parts} ranks can't share evenly; fully "
            "sharded adapters need that: take a rank that they divide, or serve without "
            "fully_sharded_loras"
        )


def _head(module: str, names: PairNames, tensors: Tensors, _helper: PEFTHelper) -> Pair:
    if names.a is None:
        raise AdapterDoesNotFit(f"{module} has a saved bias but no weight; both are needed")
    weight = _shape(names.a, tensors[names.a], 2)
    bias = weight[:1] if names.b is None else _shape(names.b, tensors[names.b], 1)
    if bias != weight[:1]:
        raise AdapterDoesNotFit(
            f"{module} has a weight {weight} and a bias {bias}; one value for each label is needed"
        )
    return Pair(module, names.a, names.b, 1, 1.0, 1.0, names.kind)


def _shape(name: str, tensor: HasShape, dimensions: int) -> list[int]:
    if not tensor.dtype.is_floating_point:
        raise AdapterDoesNotFit(f"{name} is {tensor.dtype}; a floating dtype is needed")
    if len(tensor.shape) != dimensions:
        count = "two dimensions are" if dimensions == 2 else "one dimension is"
        raise AdapterDoesNotFit(f"{name} is {list(tensor.shape)}; {count} needed")
    return list(tensor.shape)
