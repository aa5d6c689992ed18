"""Compatibility of an adapter with a model, from its config and its tensors' shapes.

No weights have been read when this is checked. A module is identified by its full path, never by
its last name alone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from loradock.engine.adapters.base_copies import (
    BaseCopy,
    add_equal_copies,
    changed_weights,
    check_same,
    comparisons_of,
    copies_of,
    differing_copies,
)
from loradock.engine.adapters.experts import (
    ExpertPair,
    Experts,
    expert_submatrices,
    pair_experts,
    split_experts,
)
from loradock.engine.adapters.output_scales import OutputVector, check_vectors, take_vectors
from loradock.engine.adapters.pairs import (
    TensorPair,
    check_rank_divisible,
    pair_up,
    saved_names,
    size_difference,
    tie_saved,
    token_pairs,
)
from loradock.engine.adapters.peft_config import CLASSIFICATION_HEADS, PEFTHelper
from loradock.engine.adapters.problems import Problems, shown
from loradock.engine.adapters.target import AdapterTarget, ModulePathResolver, Modules
from loradock.engine.adapters.targets import check_targets
from loradock.engine.adapters.tensor_names import WeightNames, is_within, sort_names
from loradock.engine.adapters.weights import (
    Inspectors,
    ReadTensors,
    Tensors,
)
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from loradock.engine.layout import SAVED_SUFFIX, WHOLE, ModuleKind, ModuleShape
from loradock.engine.submatrix import WHOLE_TENSOR, Submatrix


@dataclass(frozen=True)
class MatchedTensors:
    """An adapter's tensors: `pairs` of modules with one A and one B, and those of `experts`.

    `warnings`: findings that do not prevent the adapter's use. `helper`: the adapter's config.
    `copies`: tensors that are compared with the base model's. `same`: tensors for the weight of
    another one, with its name; their values must be equal.
    """

    pairs: list[TensorPair]
    experts: list[ExpertPair]
    vectors: list[OutputVector] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    helper: PEFTHelper | None = None
    copies: list[BaseCopy] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)

    def stored(self) -> list[TensorPair]:
        """Return all pairs, as in the file, and the vectors."""
        experts = (expert.pair for expert in self.experts)
        return [*self.pairs, *experts, *(vector.pair for vector in self.vectors)]

    @property
    def is_3d_lora_weight(self) -> bool:
        """True if tensors hold all experts of a layer; False for an adapter without experts."""
        return any(expert.expert is None for expert in self.experts)

    def for_experts(self, local_experts: range | None = None) -> "MatchedTensors":
        """Return the same for a process that keeps these experts; None: all of them."""
        return replace(self, experts=[one.for_experts(local_experts) for one in self.experts])

    def submatrices(self, modules: Modules | None = None) -> dict[str, Submatrix]:
        """Return the part of each tensor that this process keeps; none of other ranks' experts.

        Without `modules` it keeps whole ones. Tensors that are only compared with others are whole.
        """
        parts = dict.fromkeys(self.same, WHOLE_TENSOR)
        for pair in self.pairs:
            parts |= pair.submatrices(WHOLE if modules is None else modules[pair.module].shard)
        for vector in self.vectors:
            parts |= vector.pair.submatrices(WHOLE)
        return parts | expert_submatrices(self.experts)


class CopyComparisons:
    """The comparison of an adapter's copies of base weights, while its tensors are read.

    `inspectors`: what the reader passes them to. Copies without the base's values are read with
    the others.
    """

    def __init__(self, matched: MatchedTensors) -> None:
        self._matched = matched
        self._comparisons = comparisons_of(matched.copies)
        self.inspectors: Inspectors = self._comparisons

    def settle(
        self, found: ReadTensors, model: AdapterTarget, problems: Problems
    ) -> MatchedTensors:
        """Return the tensors with the modules that copies with other values replace.

        Equal copies that these modules need too are added to `found`. Raises one error for all
        problems with copies.
        """
        old = self._matched
        differing = differing_copies(self._comparisons, problems)
        changed = changed_weights(old.copies, differing, old.pairs, old.vectors, model, problems)
        problems.raise_if_any()
        matched = replace(old, pairs=old.pairs + changed.pairs, same=old.same | changed.same)
        names = {name for pair in changed.pairs for name in pair.factors()} | changed.same.keys()
        add_equal_copies(matched.copies, names, found)
        check_same(matched.same, found.tensors, problems)
        problems.raise_if_any()
        return matched


NEEDS_MODEL: Final = (
    "what fused expert tensors adapt follows from the model: pass model=, a manager or its model"
)
"""The text for expert tensors that are read without a model."""

VECTORS_NEED_MODEL: Final = (
    "magnitudes and biases are folded with the base model's weights: pass model=, a manager or its "
    "model"
)
"""The text for DoRA and biases that are read without a model."""

WEIGHTS_NEED_MODEL: Final = (
    "they are compared with the base model's weights, or are for modules that are tied in it: pass "
    "model=, a manager or its model; found without it"
)
"""The text for copies and trained tokens that are read without a model."""

EXCLUDED: Final = (
    "in the tower or the connector, which are adapted only with enable_tower_connector_lora"
)

_TENSORS_OF_KIND: Final = {
    ModuleKind.LINEAR: "lora_A and lora_B",
    ModuleKind.EMBEDDING: "lora_embedding_A and lora_embedding_B",
    ModuleKind.HEAD: "its whole weight, with modules_to_save naming it",
    ModuleKind.EXPERTS: "target_parameters",
    ModuleKind.TOKENS: "trainable_token_indices",
}
"""The tensors or config field with which an adapter adapts a module of each kind."""


def match_tensors(
    tensors: Tensors,
    helper: PEFTHelper,
    resolver: ModulePathResolver,
    model: AdapterTarget | None,
    problems: Problems,
) -> MatchedTensors:
    """Match the tensors to modules; add what is wrong with names and shapes to `problems`.

    Without `model` only checks that need none are made; experts need one. Raises
    `AdapterDoesNotFit` for an ambiguous path.
    """
    modules = {} if model is None else model.modules
    warnings: tuple[str, ...] = ()
    vectors, others = take_vectors(tensors, helper, resolver)
    found = sort_names(others, resolver, saved_names(helper, model))
    names, experts = split_experts(found, resolver, modules.values())
    check_names(names, problems, has_experts=any(one.is_touched for one in experts))
    _check_unmatched_experts(names, model, problems)
    _check_saved(names, helper, model, problems)
    pairs = [saved_as_slice(pair, modules) for pair in pair_up(names, tensors, helper, problems)]
    stacked = pair_experts(experts, tensors, helper, problems)
    same, copies = dict(names.same), []
    if model is None:
        unread = [*names.copies, *(one.a for one in names.tokens.values() if one.a)]
        problems.add_each(AdapterDoesNotFit, WEIGHTS_NEED_MODEL, unread)
    else:
        tied = tie_saved(pairs, helper, model)
        taken = {pair.module.removesuffix(SAVED_SUFFIX) for pair in tied.pairs}
        trained = token_pairs(names.tokens, taken, tensors, helper, model, problems)
        pairs, same = tied.pairs + trained.pairs, same | tied.same | trained.same
        copies = copies_of(names.copies, tensors, model, problems)
        _check_modules(pairs, tensors, helper, model, problems)
        touched = _touched_experts(stacked, experts).union(pair.module for pair in pairs)
        # The tensors of a refused pair are reported as such, and not as absent.
        touched |= names.pairs.keys()
        has_single_experts = any(one.singles for one in experts)
        warnings = check_targets(
            touched, helper, model, problems, has_single_experts=has_single_experts
        )
        _check_heads(touched, model, problems)
    if model is None and vectors:
        problems.add(AdapterDoesNotFit, VECTORS_NEED_MODEL)
    elif model is not None:
        adapted = [*pairs, *(expert.pair for expert in stacked)]
        check_vectors(vectors, adapted, tensors, helper, model, problems)
    return MatchedTensors(pairs, stacked, vectors, warnings, helper, copies, same)


def _check_unmatched_experts(
    names: WeightNames, model: AdapterTarget | None, problems: Problems
) -> None:
    """Add tensors of fused experts that belong to no experts module of the model."""
    fused = [name for pair in names.experts.values() for name in (pair.a, pair.b) if name]
    if model is not None:
        text = "tensors of experts that are not wrapped in this model"
        problems.add_each(AdapterDoesNotFit, text, fused)
    elif fused:
        problems.add(AdapterDoesNotFit, f"{NEEDS_MODEL} ({fused[0]})")


def _touched_experts(stacked: Iterable[ExpertPair], experts: Iterable[Experts]) -> set[str]:
    """Return the columns that the file has tensors for; for refused experts all of them."""
    touched = {column.name for pair in stacked for column in pair.columns}
    for one in experts:
        columns = {column.name for column in one.columns.values()}
        if one.is_touched and touched.isdisjoint(columns):
            touched |= columns
    return touched


def saved_as_slice(pair: TensorPair, modules: Modules) -> TensorPair:
    """Return a saved module's pair under the name of the slice that replaces the module whole."""
    name = pair.module + SAVED_SUFFIX
    return pair._replace(module=name) if pair.kind is ModuleKind.HEAD and name in modules else pair


def check_names(names: WeightNames, problems: Problems, has_experts: bool = False) -> None:
    """Add unknown names, and a file without any A or B, to `problems`."""
    problems.add_each(AdapterDoesNotFit, "unexpected tensors", names.unexpected)
    if not (names.pairs or names.experts or has_experts or names.tokens):
        problems.add(
            AdapterDoesNotFit, "no tensor is an A or a B of a module; save the adapter with PEFT"
        )


def _check_saved(
    names: WeightNames, helper: PEFTHelper, model: AdapterTarget | None, problems: Problems
) -> None:
    """Add saved modules without a tensor; PEFT ignores names of none of the model's modules."""
    sources = [p.source for p in names.pairs.values() if p.kind is ModuleKind.HEAD]
    missing = [
        name
        for name in helper.modules_to_save
        if not any(is_within(one, name) for one in sources)
        and (model is None or model.has_module(name))
    ]
    # PEFT adds all names of classification heads, of which a model has one.
    if sources:
        missing = [name for name in missing if name not in CLASSIFICATION_HEADS]
    if missing:
        listed = ", ".join(map(shown, missing))
        problems.add(
            AdapterDoesNotFit, f"modules_to_save names {listed}, but no tensor belongs to them"
        )


def _check_modules(
    pairs: Iterable[TensorPair],
    tensors: Tensors,
    helper: PEFTHelper,
    model: AdapterTarget,
    problems: Problems,
) -> None:
    """Check the pairs against the model's modules and the engine's limits."""
    modules = model.modules
    with problems.collecting():
        helper.validate_legal(model.lora_config)
    touched = {pair.module: pair for pair in pairs}
    left_out = [module for module in touched if model.excludes(module)]
    problems.add_each(AdapterDoesNotFit, EXCLUDED, left_out)
    unknown = [module for module in touched if module not in modules and module not in left_out]
    unknown[:1] = [_with_hint(module, model) for module in unknown[:1]]
    count = f" ({len(unknown)} of {len(touched)} modules)" if len(unknown) > 1 else ""
    problems.add_each(AdapterDoesNotFit, f"not wrapped in this model{count}", unknown)
    known = [(pair, modules[pair.module]) for pair in touched.values() if pair.module in modules]
    _check_orientation(known, helper, problems)
    resized: dict[str, str] = {}
    for pair, shape in known:
        with problems.collecting():
            _check_kind(pair, shape)
            if difference := size_difference(pair, shape, tensors):
                resized[pair.module] = difference
            elif pair.kind is not ModuleKind.HEAD:
                check_rank_divisible(pair.module, pair.rank, shape.shard)
    _add_size_differences(resized, len(touched), helper, problems)


def _check_heads(touched: Collection[str], model: AdapterTarget, problems: Problems) -> None:
    """Add heads that neither the model nor the file has: their scores would be random."""
    shapes = model.modules.values()
    heads = [s.name for s in shapes if s.kind is ModuleKind.HEAD and not s.is_optional]
    missing = [name for name in heads if model.requires_head and name not in touched]
    text = "the model was saved without a head and the adapter contains none (modules_to_save)"
    problems.add_each(AdapterDoesNotFit, text, missing)


def _check_orientation(
    known: Sequence[tuple[TensorPair, ModuleShape]], helper: PEFTHelper, problems: Problems
) -> None:
    """Add a `fan_in_fan_out` that is wrong for all linear layers.

    If an adapter touches layers of both orientations, no value is right for all, and PEFT decides
    for each layer.
    """
    linear = [(pair, shape) for pair, shape in known if shape.kind is ModuleKind.LINEAR]
    wrong = [pair.module for pair, shape in linear if helper.fan_in_fan_out != shape.transposed]
    if len(wrong) == len(linear):
        text = f"fan_in_fan_out is {helper.fan_in_fan_out}, but these layers need the opposite"
        problems.add_each(AdapterConfigRefused, text, wrong)


def _check_kind(pair: TensorPair, shape: ModuleShape) -> None:
    if pair.kind is not shape.kind:
        raise AdapterDoesNotFit(
            f"{pair.module} is of kind {shape.kind.value}, which an adapter changes by "
            f"{_TENSORS_OF_KIND[shape.kind]}"
        )


def _add_size_differences(
    resized: Mapping[str, str], modules: int, helper: PEFTHelper, problems: Problems
) -> None:
    """Add one problem for all modules of other sizes, of the adapter's `modules`."""
    if not resized:
        return
    text = next(iter(resized.values()))
    if len(resized) > 1:
        base = helper.base_model_name
        named = f" (its base_model_name_or_path is {shown(base)})" if base else ""
        differ = f"{len(resized)} of its {modules} modules differ"
        text = f"trained for a model of other sizes{named}: {differ}; {text}"
    problems.add(AdapterDoesNotFit, text, resized.values())


def _with_hint(module: str, model: AdapterTarget) -> str:
    if module in model.unwrapped:
        return f"{module} ({model.unwrapped[module]})"
    near = next((name for name in model.modules if name.endswith(f".{module}")), None)
    return module if near is None else f"{module} (there is {near})"


def check_vocabulary(
    pairs: Iterable[TensorPair], tensors: Tensors, vocab_size: int | None, problems: Problems
) -> None:
    """Add adapted embeddings whose A has another number of columns; `vocab_size` None: any."""
    for pair in pairs:
        shape = tensors[pair.a].shape
        if pair.kind is ModuleKind.EMBEDDING and vocab_size not in (None, shape[1]):
            problems.add(
                AdapterDoesNotFit,
                f"{pair.module} has an A for {shape[1]} tokens; the model has {vocab_size}",
            )


def check_expert_format(is_3d_lora_weight: bool, matched: MatchedTensors) -> None:
    """Raise `AdapterDoesNotFit` if fused expert tensors are required and the file has none."""
    if is_3d_lora_weight and not matched.is_3d_lora_weight:
        found = "for single experts (2-D)" if matched.experts else "absent"
        raise AdapterDoesNotFit(
            f"is_3d_lora_weight is True, and the file's expert tensors are {found}; leave it out "
            "to have the files decide"
        )
