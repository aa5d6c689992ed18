"""One adapter in host memory: its modules' weights, by module path."""

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from loradock.engine.adapters.directory import open_adapter
from loradock.engine.adapters.experts import MoEEPLoadSpec, expert_stacks, expert_submatrices
from loradock.engine.adapters.layer_weights import LoRALayerWeights, highest_rank
from loradock.engine.adapters.lora_request import tensorizer_directory
from loradock.engine.adapters.matching import (
    CopyComparisons,
    MatchedTensors,
    check_vocabulary,
    match_tensors,
)
from loradock.engine.adapters.output_scales import fold_vectors
from loradock.engine.adapters.pairs import TensorPair, check_values
from loradock.engine.adapters.peft_config import PEFTHelper
from loradock.engine.adapters.problems import Problems
from loradock.engine.adapters.target import (
    AdapterTarget,
    ModulePathResolver,
    ReadBase,
    rename_of,
    suffixes,
    target_of,
)
from loradock.engine.adapters.weights import TensorQuery, ValueRange, open_weights, read_in_memory
from loradock.engine.config import DEFAULT_BOUNDS
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import WHOLE, ModuleKind, ModuleShape, Shard, token_digits

_lora_ids: Final = count(1)


def get_lora_id() -> int:
    """Return an adapter id that no other call of this process has returned."""
    return next(_lora_ids)


class LoRAModel:
    """One adapter: its id (at least 1), its highest rank, and its weights by module path.

    `is_3d_lora_weight`: its experts' weights come from tensors for all experts of a layer.
    `peft_helper`: the config that they were read with, which a manager compares with its model's
    layers; None for weights without one.
    """

    def __init__(
        self,
        lora_model_id: int,
        rank: int,
        loras: dict[str, LoRALayerWeights],
        is_3d_lora_weight: bool = False,
        *,
        peft_helper: PEFTHelper | None = None,
    ) -> None:
        """Raises `TypeError` for an id that is no integer, and `ValueError` for one under 1."""
        # Ids often come out of arrays.
        lora_model_id = operator.index(lora_model_id)
        if lora_model_id < 1:
            raise ValueError(
                f"adapter id is {lora_model_id}; at least 1, because 0 is the base model"
            )
        self.id = lora_model_id
        self.rank = rank
        self.loras = loras
        self.is_3d_lora_weight = is_3d_lora_weight
        self.peft_helper = peft_helper

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(lora.size_bytes for lora in self.loras.values())

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """Return the same weights under another id; the tensors are shared."""
        return self._with(dict(self.loras), lora_model_id)

    def sharded(self, modules: Mapping[str, ModuleShape]) -> "LoRAModel":
        """Return the part of a whole adapter that a process keeps; `modules` covers the adapter."""
        loras = {name: lora.sharded(modules[name].shard) for name, lora in self.loras.items()}
        return self._with(loras, self.id)

    def _with(self, loras: dict[str, LoRALayerWeights], lora_model_id: int) -> "LoRAModel":
        return LoRAModel(
            lora_model_id, self.rank, loras, self.is_3d_lora_weight, peft_helper=self.peft_helper
        )

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """Return a module's weights; None if the adapter does not touch it."""
        return self.loras.get(module_name)

    def check_lora_name(self, module_name: str) -> bool:
        """Return whether the adapter touches a module."""
        return module_name in self.loras

    @classmethod
    def from_lora_tensors(  # noqa: PLR0913, PLR0917 - the signature of vLLM
        cls,
        lora_model_id: int | None,
        tensors: Mapping[str, torch.Tensor],
        peft_helper: PEFTHelper,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None,
        weights_mapper: object = None,
        skip_prefixes: Iterable[str] | None = None,
        *,
        model: object = None,
    ) -> "LoRAModel":
        """Return an adapter of tensors in memory, named as in PEFT's files.

        `lora_model_id` None: a new id. Tensors with the right device and dtype (None: any) are
        shared, not copied. `model_vocab_size`: the rows that an adapted embedding must have.
        `weights_mapper`: see `rename_of`. With `model`, a manager, its model or its
        `adapter_target`, the checks are those of files that an engine reads; without it only those
        that need no model. Raises one `EngineError` for all problems with names, shapes, dtypes or
        values.
        """
        target = None if model is None else target_of(model)
        resolver = _resolver(target, weights_mapper, skip_prefixes)
        problems = Problems(DEFAULT_BOUNDS.problems_max)
        matched = match_tensors(tensors, peft_helper, resolver, target, problems).for_experts()
        check_vocabulary(matched.pairs, tensors, model_vocab_size, problems)
        problems.raise_if_any()
        compared = CopyComparisons(matched)
        wanted = {*matched.same, *(name for pair in matched.stored() for name in pair.factors())}
        found = read_in_memory(tensors, wanted, compared.inspectors)
        if target is not None:
            matched = compared.settle(found, target, problems)
        placed = {name: tensor.to(device, dtype) for name, tensor in found.tensors.items()}
        parts = expert_submatrices(matched.experts).items()
        placed |= {name: part.select(placed[name]) for name, part in parts}
        return cls._checked(lora_model_id, matched, placed, found.ranges, dtype, target)

    @classmethod
    def from_local_checkpoint(  # noqa: PLR0913 - the signature of vLLM
        cls,
        lora_dir: str,
        expected_lora_modules: Collection[str],
        peft_helper: PEFTHelper,
        *,
        lora_model_id: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        model_vocab_size: int | None = None,
        weights_mapper: object = None,
        tensorizer_config_dict: Mapping[str, Any] | None = None,
        skip_prefixes: Iterable[str] | None = None,
        moe_ep_spec: MoEEPLoadSpec | None = None,
        allow_pickled: bool = False,
        model: object = None,
    ) -> "LoRAModel":
        """Return an adapter from a directory whose path is trusted; links below it are refused.

        `expected_lora_modules`: full paths or dot-bounded suffixes; an A and B of other modules
        are refused.
        `moe_ep_spec`: read only the experts of one rank. Without `model` its widths are not known,
        so they are checked when the adapter is added. The other arguments are those of
        `from_lora_tensors`. Raises like it and `open_adapter`.
        """
        target = None if model is None else target_of(model)
        resolver = _resolver(target, weights_mapper, skip_prefixes)
        path = tensorizer_directory(lora_dir, tensorizer_config_dict)
        local_experts = None if moe_ep_spec is None else moe_ep_spec.local_experts
        problems = Problems(DEFAULT_BOUNDS.problems_max)
        with open_adapter(path, [Path(path)], allow_pickled=allow_pickled) as files:
            reader = open_weights(files.weights, DEFAULT_BOUNDS)
            matched = match_tensors(reader.tensors, peft_helper, resolver, target, problems)
            _check_expected(matched, expected_lora_modules, problems)
            check_vocabulary(matched.pairs, reader.tensors, model_vocab_size, problems)
            problems.raise_if_any()
            matched = _without_remote(matched.for_experts(local_experts), moe_ep_spec)
            compared = CopyComparisons(matched)
            found = reader.read(TensorQuery(matched.submatrices(), compared.inspectors))
            if target is not None:
                matched = compared.settle(found, target, problems)
            files.check_unchanged()
        placed = {name: tensor.to(device, dtype) for name, tensor in found.tensors.items()}
        return cls._checked(lora_model_id, matched, placed, found.ranges, dtype, target)

    @classmethod
    def _checked(
        cls,
        lora_model_id: int | None,
        matched: MatchedTensors,
        placed: Mapping[str, torch.Tensor],
        ranges: Mapping[str, ValueRange],
        dtype: torch.dtype | None,
        target: AdapterTarget | None,
    ) -> "LoRAModel":
        """Return an adapter of tensors whose values have these ranges; raises `NotFinite`."""
        problems = Problems(DEFAULT_BOUNDS.problems_max)
        kept = [pair for pair in matched.stored() if pair.a in placed]
        check_values(kept, ranges, dtype or torch.float32, problems)
        problems.raise_if_any()
        adapter_id = lora_model_id or get_lora_id()
        if target is None:
            return cls.from_matched(adapter_id, matched, placed)
        return cls.from_matched(adapter_id, matched, placed, read_base=target.read_base)

    @classmethod
    def from_matched(
        cls,
        lora_model_id: int,
        matched: MatchedTensors,
        tensors: Mapping[str, torch.Tensor],
        shards: Mapping[str, Shard] = MappingProxyType({}),
        read_base: ReadBase = lambda _: None,
    ) -> "LoRAModel":
        """Return an adapter of checked tensors, which are shared, except for experts' B.

        For the modules in `shards` the tensors are the parts that it specifies. `read_base`: for
        output vectors.
        """
        loras = {
            pair.module: _weights(pair, tensors, shards.get(pair.module, WHOLE))
            for pair in matched.pairs
        }
        for column, pair, a, b in expert_stacks(matched.experts, tensors):
            loras[column.name] = LoRALayerWeights(
                column.name, pair.rank, pair.alpha, a, b, pair.scaling, column.shard, column.kind
            )
        fold_vectors(loras, matched.vectors, tensors, read_base)
        if not loras:
            raise AdapterDoesNotFit("no module is touched; this rank keeps none of the experts")
        rank = highest_rank(loras.values())
        is_3d, helper = matched.is_3d_lora_weight, matched.helper
        return cls(lora_model_id, rank, loras, is_3d, peft_helper=helper)


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that was read and checked.

    `fingerprint`: see `TensorQuery.start_fingerprint`; empty if a follower read it. `model`: its
    weights as stored, under id 1; for sharded modules only this process's part. `rank`: its
    highest. `host_bytes`: the size of the weights. `blob_bytes`: their size once staged, on host
    and device. `stamp`: of the files and these sizes; it must be equal on all ranks. `warnings`:
    findings that do not prevent the adapter's use.
    """

    fingerprint: str
    model: LoRAModel
    rank: int
    host_bytes: int
    blob_bytes: int
    stamp: str = ""
    warnings: tuple[str, ...] = ()


def _resolver(
    target: AdapterTarget | None, weights_mapper: object, skip_prefixes: Iterable[str] | None
) -> ModulePathResolver:
    rename, skipped = rename_of(weights_mapper), tuple(skip_prefixes or ())
    if target is None:
        return ModulePathResolver(rename=rename, skip_prefixes=skipped)
    return target.path_resolver(rename, skipped)


def _check_expected(matched: MatchedTensors, expected: Collection[str], problems: Problems) -> None:
    """Add modules that are not expected; experts also go by their columns and their module.

    Modules that the adapter replaces whole have no A and B, so they are not among the expected.
    """
    replacing = (ModuleKind.HEAD, ModuleKind.TOKENS)
    adapted = [pair.module for pair in matched.pairs if pair.kind not in replacing]
    names = {module: [module] for module in adapted}
    for pair, columns, _ in matched.experts:
        paths = [column.name for column in columns]
        names[pair.module] = [pair.module, *paths, paths[0].rpartition(".")[0]]
    others = [module for module, known in names.items() if suffixes(known).isdisjoint(expected)]
    problems.add_each(AdapterDoesNotFit, "not among the expected modules", others)


def _without_remote(matched: MatchedTensors, spec: MoEEPLoadSpec | None) -> MatchedTensors:
    """Return the matched tensors without those of experts that another rank keeps."""
    if spec is None:
        return matched
    pairs = [pair for pair in matched.pairs if not spec.is_remote(pair.a)]
    experts = [
        one for one in matched.experts if one.expert is None or not spec.is_remote(one.pair.a)
    ]
    return replace(matched, pairs=pairs, experts=experts)


def _weights(
    pair: TensorPair, tensors: Mapping[str, torch.Tensor], shard: Shard
) -> LoRALayerWeights:
    a = tensors[pair.a]
    if pair.kind is ModuleKind.TOKENS:
        ids, order = torch.tensor(pair.token_ids).sort()
        digits = token_digits(ids).to(a.device)
        return LoRALayerWeights(
            pair.module, pair.rank, pair.alpha, a[order.to(a.device)], digits, 1.0, kind=pair.kind
        )
    b = a.new_zeros(len(a)) if pair.b is None else tensors[pair.b]
    if pair.kind is ModuleKind.HEAD:
        a = a if a.ndim > 1 else a[:, None]
        b, shard = b[:, None], WHOLE
    elif a.ndim > 2:
        # Of a convolution: B has width 1, and A's kernel is a part of its inputs.
        a, b = a.flatten(1), b.flatten(1)
    return LoRALayerWeights(
        pair.module, pair.rank, pair.alpha, a, b, pair.scaling, shard, pair.kind
    )
