"""Whether an adapter fits a model, from its config and its tensors' shapes alone.

What it is: the checks that need no value. What it is not: a reader; nothing of the weights was
read yet when it is asked. One rule: a module is what its full path says, never what its last name
resembles.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from engine.config import LoRAConfig
from engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from engine.layout import ModuleShape
from engine.peft_config import PEFTHelper
from engine.problems import Problems, shown
from engine.weight_names import PairNames, WeightNames

_SCALING_MAX: Final = 3.0e38
_SCALING_MIN: Final = 1.2e-38


class HasShape(Protocol):
    """A tensor, in memory or still in its file."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""
        ...


Tensors = Mapping[str, HasShape]


class Pair(NamedTuple):
    """One module's A `[rank, in]` and B `[out, rank]`, by name, and what multiplies them."""

    module: str
    a: str
    b: str
    rank: int
    alpha: float
    scaling: float


def check_names(names: WeightNames, problems: Problems) -> None:
    """Tell names that mean nothing here, and a file that has none with a meaning."""
    problems.add_each(AdapterDoesNotFit, "unexpected tensors", names.unexpected)
    if not names.pairs:
        problems.add(AdapterDoesNotFit, "no tensor is an A or a B of a linear layer")


def pair_up(
    names: WeightNames, tensors: Tensors, helper: PEFTHelper, problems: Problems
) -> list[Pair]:
    """The modules whose A and B are there and agree with each other and with the config."""
    pairs: list[Pair] = []
    for module, found in names.pairs.items():
        with problems.collecting():
            pairs.append(_pair(module, found, tensors, helper))
    return pairs


def _pair(module: str, names: PairNames, tensors: Tensors, helper: PEFTHelper) -> Pair:
    if names.a is None or names.b is None:
        there, missing = ("A", "B") if names.b is None else ("B", "A")
        raise AdapterDoesNotFit(f"{module} has lora_{there} but no lora_{missing}; both are needed")
    rank, alpha = helper.rank_of(names.source), helper.alpha_of(names.source)
    scaling = helper.scaling_of(names.source)
    a, b = tensors[names.a], tensors[names.b]
    for name, tensor in ((names.a, a), (names.b, b)):
        if not tensor.dtype.is_floating_point:
            raise AdapterDoesNotFit(f"{name} is {tensor.dtype}; a floating dtype is needed")
        if len(tensor.shape) != 2:
            raise AdapterDoesNotFit(f"{name} is {list(tensor.shape)}; two dimensions are needed")
    if a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterDoesNotFit(
            f"{module} has A {list(a.shape)} and B {list(b.shape)}; the config gives it rank {rank}"
        )
    if not _SCALING_MIN <= abs(scaling) <= _SCALING_MAX:
        raise AdapterConfigRefused(
            f"{module} has alpha {alpha} and rank {rank}, a scaling of {scaling}; one that float32 "
            "can hold is needed"
        )
    return Pair(module, names.a, names.b, rank, alpha, scaling)


def check_modules(
    pairs: Iterable[Pair],
    tensors: Tensors,
    helper: PEFTHelper,
    modules: Mapping[str, ModuleShape],
    lora_config: LoRAConfig,
    problems: Problems,
) -> None:
    """Hold the pairs against the model's modules and the engine's limits."""
    with problems.collecting():
        helper.validate_legal(lora_config)
    touched = {pair.module: pair for pair in pairs}
    unknown = [module for module in touched if module not in modules]
    unknown[:1] = [_with_hint(module, modules) for module in unknown[:1]]
    problems.add_each(AdapterDoesNotFit, "not wrapped in this model", unknown)
    known = [(pair, modules[pair.module]) for pair in touched.values() if pair.module in modules]
    turned = [pair.module for pair, shape in known if helper.fan_in_fan_out != shape.transposed]
    says = f"fan_in_fan_out is {helper.fan_in_fan_out}, but their weights lie the other way"
    problems.add_each(AdapterConfigRefused, says, turned)
    for pair, shape in known:
        a, b = list(tensors[pair.a].shape), list(tensors[pair.b].shape)
        if a[1] != shape.in_features or b[0] != shape.out_features:
            problems.add(
                AdapterDoesNotFit,
                f"{pair.module} has A {a} and B {b}; this "
                f"model's takes {shape.in_features} and gives {shape.out_features}",
            )
        if pair.rank % shape.shard.rank_parts:
            problems.add(
                AdapterDoesNotFit,
                f"{pair.module} has rank {pair.rank}, which {shape.shard.rank_parts} ranks can't "
                "share evenly; fully sharded adapters need that: take a rank that they divide, or "
                "serve without fully_sharded_loras",
            )
    problems.add_each(
        AdapterDoesNotFit, "target_modules without a tensor", _untouched(touched, helper, modules)
    )


def _with_hint(module: str, modules: Mapping[str, ModuleShape]) -> str:
    near = next((name for name in modules if name.endswith(f".{module}")), None)
    return module if near is None else f"{module} (there is {near})"


def _untouched(
    touched: Iterable[str], helper: PEFTHelper, modules: Mapping[str, ModuleShape]
) -> list[str]:
    """The targets that this model has but the file has nothing for: half an adapter."""
    if isinstance(helper.target_modules, str) or helper.has_exclusions:
        return []
    adapted = suffixes(touched)
    missing = [name for name in helper.target_modules if name not in adapted]
    there = suffixes(modules) if missing else set()
    return [shown(name) for name in missing if name in there]


def suffixes(names: Iterable[str]) -> set[str]:
    """Every name, and what follows each of its dots."""
    return {
        name[start:]
        for name in names
        for start in (0, *(i + 1 for i, c in enumerate(name) if c == "."))
    }
