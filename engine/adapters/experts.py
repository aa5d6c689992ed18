"""Expert tensors of an adapter, per expert (2-D) or fused (3-D): matched to columns, and stacked.

A fused tensor's name alone never determines what it adapts: the config's `target_parameters` do,
and the shapes must agree.

Per expert: `<experts>.3.gate_proj`, each with an A `[rank, in]` and a B `[out, rank]`. Fused:
`<experts>` or `<experts>.base_layer`, with an A `[experts * rank, in]`, expert after expert, and a
B `[out, rank * experts]`, the expert counted fastest. If both parameters are adapted, gate_up
is the inner one, under `base_layer`; if one is adapted, it has the plain name.

The weights of either format become one stack per directory column. A process reads no weights of
other ranks' experts, except if each row of a stored matrix holds all experts.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from loradock.engine.adapters.pairs import TensorPair, check_rank_divisible, make_pair
from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.problems import Problems
from loradock.engine.adapters.target import ModulePathResolver
from loradock.engine.adapters.tensor_names import PairNames, WeightNames
from loradock.engine.adapters.weights import Tensors
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import ModuleKind, ModuleShape, Shard
from loradock.engine.submatrix import Submatrix

K = TypeVar("K")

SINGLE_EXPERT: Final = re.compile(r"(.+)\.(\d{1,6})\.(\w+)\Z")
"""A path of one projection of one expert: the experts module, the expert and the projection."""

PROJECTIONS: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Older names of projections, and their names in models."""
_PARENTS: Final = {".block_sparse_moe.": ".mlp."}
"""Older names of the module that holds experts and router, and its name in models."""
_INNER: Final = ".base_layer"


class ExpertPair(NamedTuple):
    """An A and a B of the file, and the columns that they fill: several if they are split.

    `expert`: its index; None for a fused pair, which is for all experts.
    """

    pair: TensorPair
    columns: tuple[ModuleShape, ...]
    expert: int | None = None

    def for_experts(self, local_experts: range | None) -> "ExpertPair":
        """Return the same for a process that keeps these experts whole; None: all of them."""
        shard = Shard(experts=local_experts)
        return self._replace(columns=tuple(replace(one, shard=shard) for one in self.columns))


class ExpertProjection(NamedTuple):
    """One projection of one expert, as a per-expert path names it."""

    expert: int
    projection: str


@dataclass
class Experts:
    """One experts module: its columns by their last name, and the file's tensors for it.

    `path`: of the module. `fused`: by the number of wrappers inside, which is 1 for `base_layer`.
    """

    path: str
    columns: dict[str, ModuleShape] = field(default_factory=dict)
    fused: dict[int, PairNames] = field(default_factory=dict)
    singles: dict[ExpertProjection, PairNames] = field(default_factory=dict)

    @property
    def is_touched(self) -> bool:
        """True if the file has tensors for the module."""
        return bool(self.fused or self.singles)

    @property
    def parameters(self) -> dict[str, tuple[ModuleShape, ...]]:
        """The columns of each model parameter, by its last name, the inner parameter first."""
        found: dict[str, tuple[ModuleShape, ...]] = {}
        for shape in self.columns.values():
            last = shape.parameter.rpartition(".")[2]
            found[last] = (*found.get(last, ()), shape)
        # A column for all of a parameter is filled instead of those for its parts.
        return {
            last: (self.columns[last],) if last in self.columns else columns
            for last, columns in found.items()
        }


def split_experts(
    names: WeightNames, resolver: ModulePathResolver, modules: Iterable[ModuleShape]
) -> tuple[WeightNames, list[Experts]]:
    """Return the names of other modules, and the model's experts modules with their names.

    Fused names of experts that are not among `modules` stay in `experts` of the result. A second
    pair for the same matrix, under an older name, is added to `unexpected`.
    """
    known = known_experts(modules)
    result = names._replace(pairs={}, experts={}, unexpected=[*names.unexpected])
    for written, found in names.experts.items():
        outer = resolver.locate(renamed(written.removesuffix(_INNER), known))
        if outer in known:
            _add_pair(known[outer].fused, int(written.endswith(_INNER)), found, result.unexpected)
        else:
            result.experts[written] = found
    for written, found in names.pairs.items():
        path = renamed(written, known)
        match = SINGLE_EXPERT.match(path)
        experts = known.get(resolver.locate(match[1])) if match else None
        if match and experts:
            projection = PROJECTIONS.get(match[3], match[3])
            _add_pair(
                experts.singles,
                ExpertProjection(int(match[2]), projection),
                found,
                result.unexpected,
            )
        else:
            _add_pair(result.pairs, path, found, result.unexpected)
    return result, list(known.values())


def _add_pair(
    pairs_by_key: dict[K, PairNames], key: K, found: PairNames, unexpected: list[str]
) -> None:
    """Add a pair to `pairs_by_key`, unless that has another for the same matrix."""
    first = pairs_by_key.setdefault(key, found)
    if first is not found:
        first_name = first.a or first.b
        unexpected += [f"{name} (the same as {first_name})" for name in (found.a, found.b) if name]


def renamed(path: str, known: Collection[str]) -> str:
    """Return a path with the older parent renamed, if the model has the newer one."""
    for old, new in _PARENTS.items():
        before, found, _ = path.partition(old)
        if found and f"{before}{new}experts" in known:
            return path.replace(old, new, 1)
    return path


def known_experts(modules: Iterable[ModuleShape]) -> dict[str, Experts]:
    """Return the experts modules of a model by path, with their columns and without tensors."""
    known: dict[str, Experts] = {}
    for shape in modules:
        if shape.kind is ModuleKind.EXPERTS:
            path, _, last = shape.name.rpartition(".")
            known.setdefault(path, Experts(path)).columns[last] = shape
    return known


def pair_experts(
    found: Iterable[Experts], tensors: Tensors, helper: PEFTHelper, problems: Problems
) -> list[ExpertPair]:
    """Return the pairs of all experts modules, checked against config and shapes."""
    pairs: list[ExpertPair] = []
    for experts in found:
        with problems.collecting():
            if experts.fused and experts.singles:
                raise AdapterDoesNotFit(
                    f"{experts.path} has tensors per expert and fused ones; use one of the formats"
                )
            pairs += _fused_pairs(experts, tensors, helper)
            pairs += _single_pairs(experts, tensors, helper)
    return pairs


def _fused_pairs(experts: Experts, tensors: Tensors, helper: PEFTHelper) -> Iterator[ExpertPair]:
    for parameter, names in _parameters_of(experts, tensors, helper).items():
        columns = experts.parameters[parameter]
        module = f"{experts.path}.{parameter}"
        key = f"{names.source.removesuffix(_INNER)}.{parameter}"
        count = columns[0].experts
        pair = make_pair(module, names, tensors, helper, key, count)
        _check_fit(pair, tensors, columns)
        yield ExpertPair(pair, columns)


def _parameters_of(experts: Experts, tensors: Tensors, helper: PEFTHelper) -> dict[str, PairNames]:
    """Return the fused pair of each adapted parameter."""
    names = list(experts.parameters)
    if len(experts.fused) == len(names):
        return {name: experts.fused[1 - index] for index, name in enumerate(names)}
    if not experts.fused:
        return {}
    ((depth, only),) = experts.fused.items()
    source = only.source.removesuffix(_INNER)
    targets = [name for name in names if helper.targets_parameter(f"{source}.{name}")]
    candidates = targets or [name for name in names if _fits(experts, name, only, tensors)]
    if depth or len(candidates) != 1:
        raise AdapterDoesNotFit(
            f"{experts.path} has fused tensors under {only.source} alone, and the config's "
            f"target_parameters name {' and '.join(targets) or 'none of its parameters'}; they "
            "must name the one that is adapted"
        )
    return {candidates[0]: only}


def _fits(experts: Experts, parameter: str, names: PairNames, tensors: Tensors) -> bool:
    columns = experts.parameters[parameter]
    widths = (columns[0].in_features, sum(shape.out_features for shape in columns))
    dimensions = ((names.a, 1, widths[0]), (names.b, 0, widths[1]))
    return all(
        name is None or list(tensors[name].shape[dimension:])[:1] == [width]
        for name, dimension, width in dimensions
    )


def _single_pairs(experts: Experts, tensors: Tensors, helper: PEFTHelper) -> list[ExpertPair]:
    pairs: list[ExpertPair] = []
    for (expert, projection), names in experts.singles.items():
        column = experts.columns.get(projection)
        module = f"{experts.path}.{expert}.{projection}"
        if column is None:
            served = ", ".join(experts.columns)
            raise AdapterDoesNotFit(
                f"{module} is none of the projections of these experts, which are {served}"
            )
        if expert >= column.experts:
            raise AdapterDoesNotFit(
                f"{module} is not there: this model has {column.experts} experts"
            )
        pair = make_pair(module, names, tensors, helper, names.source)
        _check_fit(pair, tensors, (column,))
        pairs.append(ExpertPair(pair, (column,), expert))
    _check_stacks(pairs)
    _check_complete(experts, helper)
    return pairs


def _check_stacks(pairs: Iterable[ExpertPair]) -> None:
    """Refuse experts of one projection whose matrices can't be in one stack."""
    first: dict[str, TensorPair] = {}
    for pair, (column,), _ in pairs:
        other = first.setdefault(column.name, pair)
        if (other.rank, other.scaling) != (pair.rank, pair.scaling):
            raise AdapterDoesNotFit(
                f"{other.module} has rank {other.rank} and scaling {other.scaling}, {pair.module} "
                f"{pair.rank} and {pair.scaling}; all experts of one projection need the same"
            )


def _check_complete(experts: Experts, helper: PEFTHelper) -> None:
    """Refuse an incomplete adapter: targets that are plain names adapt every expert."""
    if isinstance(helper.target_modules, str) or helper.has_exclusions:
        return
    for projection in sorted({single.projection for single in experts.singles}):
        present = {single.expert for single in experts.singles if single.projection == projection}
        missing = experts.columns[projection].experts - len(present)
        if missing:
            raise AdapterDoesNotFit(
                f"{experts.path} lacks {projection} of {missing} experts, but target_modules "
                "names it for all"
            )


def _check_fit(pair: TensorPair, tensors: Tensors, columns: Sequence[ModuleShape]) -> None:
    """Check a pair against the columns that it fills together."""
    a, b = (list(tensors[name].shape) for name in pair.factors())
    in_features = columns[0].in_features
    out_features = sum(column.out_features for column in columns)
    if a[1] != in_features or b[0] != out_features:
        raise AdapterDoesNotFit(
            f"{pair.module} has A {a} and B {b}; in this model it has {in_features} inputs and "
            f"{out_features} outputs"
        )
    check_rank_divisible(pair.module, pair.rank, columns[0].shard)


@dataclass(frozen=True)
class MoEEPLoadSpec:
    """The experts that a rank keeps of every layer; no others are read.

    Each rank keeps `local_num_experts` adjacent experts of `global_num_experts`. Raises ValueError
    for a rank whose experts are not among them.
    """

    ep_rank: int
    local_num_experts: int
    global_num_experts: int

    def __post_init__(self) -> None:
        local = self.local_experts
        if self.ep_rank < 0 or not local or local.stop > self.global_num_experts:
            raise ValueError(
                f"rank {self.ep_rank} has {self.local_num_experts} local experts, {local}; they "
                f"must be within {self.global_num_experts} experts"
            )

    @property
    def local_experts(self) -> range:
        """The rank's experts."""
        start = self.ep_rank * self.local_num_experts
        return range(start, start + self.local_num_experts)

    def is_remote(self, name: str) -> bool:
        """Return whether a tensor belongs to a single expert that the rank does not keep."""
        match = _NUMBERED_EXPERT.search(name)
        return match is not None and int(match[1]) not in self.local_experts


_NUMBERED_EXPERT: Final = re.compile(r"\.experts\.(\d{1,6})\.")


def expert_submatrices(pairs: Iterable[ExpertPair]) -> dict[str, Submatrix]:
    """Return the part of each tensor that this process keeps; none of other ranks' experts."""
    parts: dict[str, Submatrix] = {}
    for pair, columns, expert in pairs:
        shard = columns[0].shard
        if expert is None:
            part = shard.a_submatrix(pair.rank * columns[0].experts)
            if shard.experts is not None:
                # A is stored expert by expert: [experts * rank, in].
                rows = range(shard.experts.start * pair.rank, shard.experts.stop * pair.rank)
                part = Submatrix((rows,))
            stored = (part, Submatrix(_fused_rows(columns)))
        elif expert in columns[0].kept_experts:
            stored = (shard.a_submatrix(pair.rank), shard.b_submatrix())
        else:
            continue
        parts |= zip(pair.factors(), stored, strict=True)
    return parts


def _fused_rows(columns: Sequence[ModuleShape]) -> tuple[range, ...] | None:
    """Return the rows of a fused B that fill these columns, in order of columns; None for all."""
    if columns[0].parameter_rows is None:
        return columns[0].shard.b_rows
    rows: list[range] = []
    for column in columns:
        within = column.parameter_rows
        all_rows = range(column.out_features) if within is None else within.rows
        wanted = column.shard.b_rows
        rows += [all_rows] if wanted is None else [all_rows[p.start : p.stop] for p in wanted]
    return tuple(rows)


class ExpertStack(NamedTuple):
    """One column's weights: A `[experts, rank, in]` and B `[experts, out, rank]`.

    `pair` has their rank, alpha and scaling.
    """

    column: ModuleShape
    pair: TensorPair
    a: Tensor
    b: Tensor


def expert_stacks(pairs: Iterable[ExpertPair], tensors: Mapping[str, Tensor]) -> list[ExpertStack]:
    """Return the weights of every touched column; `tensors` are the `expert_submatrices`."""
    pairs = list(pairs)
    stacks = [stack for pair in pairs if pair.expert is None for stack in _split(pair, tensors)]
    singles = sorted((pair for pair in pairs if pair.expert is not None), key=_column_name)
    for _, members in groupby(singles, key=_column_name):
        stacks.append(_stacked(list(members), tensors))
    return stacks


def _column_name(pair: ExpertPair) -> str:
    return pair.columns[0].name


def _split(fused: ExpertPair, tensors: Mapping[str, Tensor]) -> list[ExpertStack]:
    """Split a fused pair by expert and by column; columns share A."""
    pair, columns, _ = fused
    kept, rank = columns[0].kept_experts, pair.rank
    stored_a, stored_b = (tensors[name] for name in pair.factors())
    a = stored_a.reshape(len(kept), -1, stored_a.shape[1])
    all_b = stored_b.reshape(len(stored_b), rank, columns[0].experts)
    b = all_b[:, :, kept.start : kept.stop].permute(2, 0, 1)
    heights = [column.shard.b_height(column.out_features) for column in columns]
    parts = torch.split(b, heights, dim=1)
    return [
        ExpertStack(column, pair, a, part.contiguous())
        for column, part in zip(columns, parts, strict=True)
    ]


def _stacked(members: Sequence[ExpertPair], tensors: Mapping[str, Tensor]) -> ExpertStack:
    """Stack one projection's experts; zeros for experts that the adapter does not touch."""
    first, column = members[0].pair, members[0].columns[0]
    factors = {
        pair.expert: [tensors[name] for name in pair.pair.factors()]
        for pair in members
        if pair.expert in column.kept_experts
    }
    dtype = next((a.dtype for a, _ in factors.values()), torch.float32)
    shapes = (column.a_shape(first.rank)[1:], column.b_shape(first.rank)[1:])
    zeros = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    pairs = [factors.get(expert, zeros) for expert in column.kept_experts]
    a, b = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    return ExpertStack(column, first, a, b)
