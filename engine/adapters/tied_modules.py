"""Weights that PEFT trains for an embedding and for the modules that are tied to it together.

With `ensure_weight_tying`, a module that is saved whole is saved for all modules of the tie. Rows
of trained tokens (`trainable_token_indices`) of a tied embedding are those of the head too, unless
the config has other tokens for the head.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from loradock.engine.adapters.files.problems import Problems, shown
from loradock.engine.adapters.files.weights_file import Tensors
from loradock.engine.adapters.pairs import TensorPair
from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.tensor_names import PairNames
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit
from loradock.engine.layout import SAVED_SUFFIX, TOKENS_SUFFIX, ModuleKind, ModuleShape

_TIED_NAMES: Final = ("embed_tokens", "lm_head")
"""The names in `modules_to_save` for which PEFT follows `ensure_weight_tying`."""


class TieTarget(Protocol):
    """The model whose modules may be tied."""

    @property
    def modules(self) -> Mapping[str, ModuleShape]:
        """Its module-slices by path."""
        ...

    @property
    def tied(self) -> frozenset[str]:
        """The modules that share the token embedding's weight, itself included."""
        ...

    @property
    def token_embedding(self) -> str:
        """The path of the token embedding; empty if there is none."""
        ...


class TiedPairs(NamedTuple):
    """Pairs of modules, and tensors that stand for the weight of another one by name."""

    pairs: list[TensorPair]
    same: dict[str, str]


def saved_names(helper: PEFTHelper, model: TieTarget | None) -> tuple[str, ...]:
    """Return the names of the modules that an adapter saves whole, with those that are tied."""
    tied = frozenset() if model is None or not _ties_saved(helper) else model.tied
    return (*helper.modules_to_save, *sorted(tied))


def _ties_saved(helper: PEFTHelper) -> bool:
    """Whether PEFT ties what is saved: it looks for the names of an embedding in the config.

    Of a file that was tied under other names, the head's weight is a changed copy of the base's.
    """
    ends = {name.rpartition(".")[2] for name in helper.modules_to_save}
    return helper.ensure_weight_tying and not ends.isdisjoint(_TIED_NAMES)


def tie_saved(pairs: Sequence[TensorPair], helper: PEFTHelper, model: TieTarget) -> TiedPairs:
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
    model: TieTarget,
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
