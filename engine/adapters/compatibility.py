"""Whether an adapter fits a model, from its config and its tensors' shapes alone.

What it is: the checks that need no value. What it is not: a reader; nothing of the weights was
read yet when it is asked. One rule: a module is what its full path says, never what its last name
resembles.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from engine.adapters.expert_stacks import expert_parts
from engine.adapters.expert_tensors import ExpertPair, Experts, pair_experts, split_experts
from engine.adapters.files.problems import Problems, shown
from engine.adapters.files.weights_file import Tensors
from engine.adapters.module_paths import SKIP_PREFIXES, Equivalence, Naming, Rename
from engine.adapters.pairs import Pair, check_shared, pair_up
from engine.adapters.peft_config import PEFTHelper
from engine.adapters.tensor_names import WeightNames, sort_names
from engine.config import LoRAConfig
from engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from engine.layout import ModuleKind, ModuleShape
from engine.submatrix import Part

Modules = Mapping[str, ModuleShape]
"""What can be adapted in a model, by full path."""


@dataclass(frozen=True)
class ModelSide:
    """What of a model and its engine an adapter is held against.

    `modules`: what can be adapted; `lora_config` has its dtype resolved; `equivalences`: see
    `naming.equivalences_of`; `image_layers`: the paths of tower and connector, wrapped or not;
    `wants_head`: the model has no classification head that anybody trained.
    """

    modules: Modules
    lora_config: LoRAConfig
    equivalences: tuple[Equivalence, ...] = ()
    image_layers: frozenset[str] = frozenset()
    wants_head: bool = False

    def leaves_out(self, module: str) -> bool:
        """Whether a module stays as it is because `enable_tower_connector_lora` is off."""
        return module in self.image_layers and not self.lora_config.enable_tower_connector_lora

    def naming(
        self, rename: Rename | None = None, skip_prefixes: Iterable[str] = SKIP_PREFIXES
    ) -> Naming:
        """How paths of adapters lead to this model's."""
        known = (*self.modules, *self.image_layers)
        return Naming(known, self.equivalences, rename, skip_prefixes)


@dataclass(frozen=True)
class Fitted:
    """What an adapter's tensors are: `pairs` of modules with one A and one B, and of `experts`."""

    pairs: list[Pair]
    experts: list[ExpertPair]

    def stored(self) -> list[Pair]:
        """All of them, as the file has them."""
        return [*self.pairs, *(expert.pair for expert in self.experts)]

    def whole(self) -> "Fitted":
        """The same where nobody shares the experts' weights."""
        return replace(self, experts=[expert.whole() for expert in self.experts])

    def parts(self, modules: Modules) -> dict[str, Part]:
        """What this process keeps of each tensor; of other ranks' experts nothing."""
        own = [pair.parts(modules[pair.module].shard) for pair in self.pairs]
        return {
            name: part
            for parts in (*own, expert_parts(self.experts))
            for name, part in parts.items()
        }


LEFT_OUT: Final = (
    "in the tower or the connector, which take adapters only with enable_tower_connector_lora"
)

_TOLD: Final = {
    ModuleKind.LINEAR: "lora_A and lora_B",
    ModuleKind.EMBEDDING: "lora_embedding_A and lora_embedding_B",
    ModuleKind.HEAD: "a weight of its own, which modules_to_save names",
    ModuleKind.EXPERTS: "target_parameters",
}
"""How an adapter brings weights for a module of each kind."""


def fit(
    tensors: Tensors,
    helper: PEFTHelper,
    naming: Naming,
    model: ModelSide | None,
    problems: Problems,
) -> Fitted:
    """What the tensors are, by module; all that is wrong with names and shapes in `problems`.

    Without `model`, what needs none is checked; experts need one. Raises `AdapterDoesNotFit` for
    an ambiguous path.
    """
    modules = {} if model is None else model.modules
    found = sort_names(tensors, naming, helper.modules_to_save)
    names, experts = split_experts(found, naming, modules.values())
    check_names(names, helper, problems, has_experts=any(one.is_touched for one in experts))
    pairs = pair_up(names, tensors, helper, problems)
    stacked = pair_experts(experts, tensors, helper, problems)
    if model is not None:
        _check_modules(pairs, tensors, helper, model, problems)
        touched = _touched_experts(stacked, experts).union(pair.module for pair in pairs)
        _check_targets(touched, helper, model, problems)
        _check_heads(touched, model, problems)
        _check_copies(names.copies, tensors, modules, problems)
    return Fitted(pairs, stacked)


def _touched_experts(stacked: Iterable[ExpertPair], experts: Iterable[Experts]) -> set[str]:
    """The columns that the file has tensors for; of experts that were refused, all."""
    touched = {column.name for pair in stacked for column in pair.columns}
    for one in experts:
        columns = {column.name for column in one.columns.values()}
        if one.is_touched and touched.isdisjoint(columns):
            touched |= columns
    return touched


def check_names(
    names: WeightNames, helper: PEFTHelper | None, problems: Problems, has_experts: bool = False
) -> None:
    """Tell names that mean nothing here, a file without a meaning, and a head that is missing."""
    fused = [name for pair in names.experts.values() for name in (pair.a, pair.b) if name]
    experts = [f"{name} (of no experts that this model has wrapped)" for name in fused]
    problems.add_each(AdapterDoesNotFit, "unexpected tensors", names.unexpected + experts)
    if not names.pairs and not fused and not has_experts:
        problems.add(AdapterDoesNotFit, "no tensor is an A or a B of a module")
    has_head = any(pair.kind is ModuleKind.HEAD for pair in names.pairs.values())
    if helper is not None and helper.modules_to_save and not has_head:
        saved = ", ".join(map(shown, helper.modules_to_save))
        problems.add(AdapterDoesNotFit, f"modules_to_save names {saved}, no tensor is one of them")


def _check_modules(
    pairs: Iterable[Pair],
    tensors: Tensors,
    helper: PEFTHelper,
    model: ModelSide,
    problems: Problems,
) -> None:
    """Hold the pairs against the model's modules and the engine's limits."""
    modules = model.modules
    with problems.collecting():
        helper.validate_legal(model.lora_config)
    touched = {pair.module: pair for pair in pairs}
    left_out = [module for module in touched if model.leaves_out(module)]
    problems.add_each(AdapterDoesNotFit, LEFT_OUT, left_out)
    unknown = [module for module in touched if module not in modules and module not in left_out]
    unknown[:1] = [_with_hint(module, modules) for module in unknown[:1]]
    problems.add_each(AdapterDoesNotFit, "not wrapped in this model", unknown)
    known = [(pair, modules[pair.module]) for pair in touched.values() if pair.module in modules]
    _check_orientation(known, helper, problems)
    for pair, shape in known:
        with problems.collecting():
            _check_shape(pair, shape, tensors)


def _check_targets(
    touched: Collection[str], helper: PEFTHelper, model: ModelSide, problems: Problems
) -> None:
    """Tell targets that this model has but the file has nothing for: half an adapter.

    `touched`: every module-slice that the file has something for.
    """
    modules = model.modules
    missing = _untouched(touched, helper, model)
    problems.add_each(AdapterDoesNotFit, "target_modules without a tensor", missing)
    adapted = {modules[name].parameter for name in touched if name in modules}
    there = {shape.parameter for shape in modules.values()} if helper.target_parameters else set()
    for target in helper.target_parameters:
        found = {path for path in there if path == target or path.endswith(f".{target}")}
        if found.isdisjoint(adapted):
            why = "no tensor is for it" if found else "it is not wrapped in this model"
            problems.add(AdapterDoesNotFit, f"target_parameters name {shown(target)}; {why}")


def _check_heads(touched: Collection[str], model: ModelSide, problems: Problems) -> None:
    """Tell heads that neither the model nor the file has: their scores would be random."""
    heads = [shape.name for shape in model.modules.values() if shape.kind is ModuleKind.HEAD]
    missing = [name for name in heads if model.wants_head and name not in touched]
    text = "the model was saved without a head and the adapter brings none (modules_to_save)"
    problems.add_each(AdapterDoesNotFit, text, missing)


def _check_copies(
    copies: Mapping[str, str], tensors: Tensors, modules: Modules, problems: Problems
) -> None:
    """Tell copies of the base's embeddings that have other rows than this model: new tokens."""
    for module, name in copies.items():
        shape = modules.get(module)
        if shape is None or shape.kind not in (ModuleKind.EMBEDDING, ModuleKind.LINEAR):
            continue
        expected = [shape.in_features, shape.out_features]
        expected = expected if shape.kind is ModuleKind.EMBEDDING else expected[::-1]
        if list(tensors[name].shape) != expected:
            problems.add(
                AdapterDoesNotFit,
                f"{name} is {list(tensors[name].shape)}, this model's {expected}; an adapter that "
                "brings tokens of its own is not served",
            )


def _check_orientation(
    known: Sequence[tuple[Pair, ModuleShape]], helper: PEFTHelper, problems: Problems
) -> None:
    """Refuse a `fan_in_fan_out` that contradicts every layer for which it means something.

    Where an adapter touches layers of both kinds no value is right for all, and PEFT decides layer
    by layer.
    """
    linear = [(pair, shape) for pair, shape in known if shape.kind is ModuleKind.LINEAR]
    turned = [pair.module for pair, shape in linear if helper.fan_in_fan_out != shape.transposed]
    if len(turned) == len(linear):
        says = f"fan_in_fan_out is {helper.fan_in_fan_out}, but their weights lie the other way"
        problems.add_each(AdapterConfigRefused, says, turned)


def _check_shape(pair: Pair, shape: ModuleShape, tensors: Tensors) -> None:
    if pair.kind is not shape.kind:
        raise AdapterDoesNotFit(
            f"{pair.module} is a module of kind {shape.kind.value}; it takes {_TOLD[shape.kind]}"
        )
    a = list(tensors[pair.a].shape)
    if pair.kind is ModuleKind.HEAD:
        if a != [shape.out_features, shape.in_features]:
            raise AdapterDoesNotFit(
                f"{pair.module} has a weight {a}; this model's takes {shape.in_features} and gives "
                f"{shape.out_features}"
            )
        return
    b = [] if pair.b is None else list(tensors[pair.b].shape)
    if a[1] != shape.in_features or b[0] != shape.out_features:
        raise AdapterDoesNotFit(
            f"{pair.module} has A {a} and B {b}; this "
            f"model's takes {shape.in_features} and gives {shape.out_features}"
        )
    check_shared(pair.module, pair.rank, shape.shard)


def _with_hint(module: str, modules: Collection[str]) -> str:
    near = next((name for name in modules if name.endswith(f".{module}")), None)
    return module if near is None else f"{module} (there is {near})"


def _untouched(touched: Collection[str], helper: PEFTHelper, model: ModelSide) -> list[str]:
    """The targets that this model has but the file has nothing for: half an adapter.

    An adapter that touches nothing of what reads images was trained on a text model, whose targets
    may be called like layers of a tower.
    """
    if isinstance(helper.target_modules, str) or helper.has_exclusions:
        return []
    adapted = suffixes(touched)
    missing = [name for name in helper.target_modules if name not in adapted]
    if not missing:
        return []
    of_texts = model.modules.keys() - model.image_layers
    there = suffixes(of_texts if model.image_layers.isdisjoint(touched) else model.modules)
    return [shown(name) for name in missing if name in there]


def suffixes(names: Iterable[str]) -> set[str]:
    """Every name, and what follows each of its dots."""
    return {
        name[start:]
        for name in names
        for start in (0, *(i + 1 for i, c in enumerate(name) if c == "."))
    }
