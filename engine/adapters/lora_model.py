"""One adapter in host memory: its modules' A and B, with rank and scaling.

Shapes are checked when a module's weights are constructed, so that an existing pair can be
multiplied.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from engine.adapters.compatibility import AdapterTarget, MatchedTensors, match_tensors, suffixes
from engine.adapters.expert_stacks import expert_stacks, expert_submatrices
from engine.adapters.files.directory import open_adapter
from engine.adapters.files.formats import open_weights
from engine.adapters.files.problems import Problems
from engine.adapters.files.weights_file import value_range
from engine.adapters.finite_values import check_values
from engine.adapters.module_paths import ModulePathResolver, Rename
from engine.adapters.pairs import TensorPair
from engine.adapters.peft_config import PEFTHelper
from engine.config import DEFAULT_BOUNDS
from engine.errors import AdapterDoesNotFit
from engine.layout import WHOLE, ModuleKind, ModuleShape, Shard
from engine.submatrix import WHOLE_TENSOR


@dataclass(frozen=True)
class LoRARequest:
    """The adapter that a request uses; `lora_int_id` is at least 1, because 0 is the base model.

    `base_model_name` is informative only. `load_inplace`: read `lora_path` again although the id is
    known, once; after reading, use `loaded()`, which clears it. `is_3d_lora_weight`: whether expert
    weights are fused; None: as in the files. Raises `ValueError`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool | None = None

    def __post_init__(self) -> None:
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(
                f"lora_int_id is {self.lora_int_id!r}; an integer of at least 1 is needed"
            )
        if not self.lora_name:
            raise ValueError("lora_name is empty; a name is needed")
        if self.load_inplace and not self.lora_path:
            raise ValueError(f"load_inplace is True for {self.lora_name!r}; it needs a lora_path")

    def loaded(self) -> "LoRARequest":
        """Return the same request with `load_inplace` cleared."""
        return replace(self, load_inplace=False)


@dataclass
class LoRALayerWeights:
    """One module's weights: `lora_a` `[rank, in]`, `lora_b` `[out, rank]`.

    The module's delta is `scaling * lora_b @ lora_a`; `scaling` 0 stands for `lora_alpha / rank`.
    For a sharded module both are the parts that `shard` specifies. For kind EXPERTS both have the
    experts as their first dimension. For HEAD they are a layer's weight `[out, in]` and bias
    `[out, 1]`, of rank 1. Raises `AdapterDoesNotFit` if shapes and rank contradict each other.
    """

    module_name: str
    rank: int
    lora_alpha: float
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float = 0.0
    shard: Shard = WHOLE
    kind: ModuleKind = ModuleKind.LINEAR

    def __post_init__(self) -> None:
        if not self._is_sound():
            a, b = list(self.lora_a.shape), list(self.lora_b.shape)
            a_rank = self.shard.a_rank(self.rank)
            raise AdapterDoesNotFit(
                f"{self.module_name} has A {a} and B {b} for rank {self.rank} and kind "
                f"{self.kind.value}; A [{a_rank}, in] and B [out, {self.rank}] are needed"
            )
        self.scaling = self.scaling or self.lora_alpha / self.rank

    def _is_sound(self) -> bool:
        a, b = tuple(self.lora_a.shape), tuple(self.lora_b.shape)
        match self.kind, a, b:
            case ModuleKind.HEAD, (out, _), (height, 1):
                return out == height and self.rank == 1
            case ModuleKind.EXPERTS, (count, a_rank, _), (experts, _, b_rank):
                return (
                    count == experts
                    and a_rank == self.shard.a_rank(self.rank)
                    and (b_rank == self.rank)
                )
            case ModuleKind.LINEAR | ModuleKind.EMBEDDING, (a_rank, _), (_, b_rank):
                return (a_rank, b_rank) == (self.shard.a_rank(self.rank), self.rank)
        return False

    def sharded(self, shard: Shard) -> "LoRALayerWeights":
        """Return the part of whole weights that a process keeps; a copy unless it is the whole."""
        if shard == WHOLE:
            return self
        a, b = shard.select_a(self.lora_a), shard.select_b(self.lora_b)
        return replace(self, lora_a=a.clone(), lora_b=b.clone(), shard=shard)

    @property
    def size_bytes(self) -> int:
        """The size of both tensors."""
        return self.lora_a.nbytes + self.lora_b.nbytes

    def optimize(self) -> "LoRALayerWeights":
        """Multiply B by the scaling, in float32 and rounded once; return these weights."""
        if self.scaling != 1:
            self.lora_b = scaled(self.lora_b, self.scaling).to(self.lora_b.dtype)
            self.scaling = 1.0
        return self


@dataclass
class PackedLoRALayerWeights:
    """The weights of a packed layer, one per slice; None for a child without an adapter."""

    module_name: str
    loras: tuple[LoRALayerWeights | None, ...]

    @classmethod
    def pack(
        cls, module_name: str, loras: Sequence[LoRALayerWeights | None]
    ) -> "PackedLoRALayerWeights":
        """Combine the children's weights, shared; ValueError if the adapter touches no child."""
        if not any(loras):
            raise ValueError(f"the adapter touches no child of {module_name}")
        return cls(module_name, tuple(loras))

    @property
    def rank(self) -> int:
        """The highest rank of the children."""
        return max(lora.rank for lora in self.loras if lora)

    @property
    def lora_a(self) -> list[torch.Tensor | None]:
        """A of each child."""
        return [lora.lora_a if lora else None for lora in self.loras]

    @property
    def lora_b(self) -> list[torch.Tensor | None]:
        """B of each child."""
        return [lora.lora_b if lora else None for lora in self.loras]

    @property
    def scaling(self) -> list[float | None]:
        """The scaling of each child."""
        return [lora.scaling if lora else None for lora in self.loras]

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(lora.size_bytes for lora in self.loras if lora)

    def optimize(self) -> "PackedLoRALayerWeights":
        """Multiply each B by its scaling; return these weights."""
        for lora in self.loras:
            if lora:
                lora.optimize()
        return self


@dataclass
class LoRAModel:
    """One adapter: its id (at least 1), its highest rank, and its weights by module path."""

    id: int
    rank: int
    loras: dict[str, LoRALayerWeights]

    def __post_init__(self) -> None:
        if self.id < 1:
            raise ValueError(f"adapter id is {self.id}; at least 1, because 0 is the base model")

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(lora.size_bytes for lora in self.loras.values())

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """Return the same weights under another id; the tensors are shared."""
        return LoRAModel(lora_model_id, self.rank, dict(self.loras))

    def sharded(self, modules: Mapping[str, ModuleShape]) -> "LoRAModel":
        """Return the part of a whole adapter that a process keeps; `modules` covers the adapter."""
        loras = {name: lora.sharded(modules[name].shard) for name, lora in self.loras.items()}
        return replace(self, loras=loras)

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """Return a module's weights; None if the adapter does not touch it."""
        return self.loras.get(module_name)

    def check_lora_name(self, module_name: str) -> bool:
        """Whether the adapter touches a module."""
        return module_name in self.loras

    @classmethod
    def from_lora_tensors(  # noqa: PLR0913 - a signature of the public API
        cls,
        lora_model_id: int,
        tensors: Mapping[str, torch.Tensor],
        peft_helper: PEFTHelper,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        weights_mapper: Rename | None = None,
        skip_prefixes: Iterable[str] = (),
        model: AdapterTarget | None = None,
    ) -> "LoRAModel":
        """Return an adapter of tensors in memory, named as in PEFT's files.

        Tensors with the right device and dtype (None: any) are shared, not copied. With `model` the
        checks are those of files that an engine reads; without it only those that need no model.
        Raises one `EngineError` for all problems with names, shapes, dtypes or values.
        """
        problems = Problems(DEFAULT_BOUNDS.problems_max)
        resolver = ModulePathResolver(rename=weights_mapper, skip_prefixes=skip_prefixes)
        if model is not None:
            resolver = model.path_resolver(weights_mapper, skip_prefixes)
        matched = match_tensors(tensors, peft_helper, resolver, model, problems).whole()
        problems.raise_if_any()
        wanted = [name for pair in matched.stored() for name in pair.factors()]
        ranges = {name: value_range(tensors[name]) for name in wanted}
        check_values(matched.stored(), ranges, dtype or torch.float32, problems)
        problems.raise_if_any()
        placed = {name: tensors[name].to(device, dtype) for name in wanted}
        parts = expert_submatrices(matched.experts).items()
        placed |= {name: part.select(placed[name]) for name, part in parts}
        return cls.from_matched(lora_model_id, matched, placed)

    @classmethod
    def from_local_checkpoint(  # noqa: PLR0913 - a signature of the public API
        cls,
        lora_dir: str,
        expected_lora_modules: Collection[str],
        peft_helper: PEFTHelper,
        *,
        lora_model_id: int = 1,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        weights_mapper: Rename | None = None,
        skip_prefixes: Iterable[str] = (),
        allow_pickled: bool = False,
    ) -> "LoRAModel":
        """Return an adapter from a directory whose path is trusted; links below it are refused.

        `expected_lora_modules`: full paths or dot-bounded suffixes; other modules are refused. The
        model's widths are not known here, so they are not checked; engines use `read_adapter`.
        Raises like `from_lora_tensors` and `open_adapter`.
        """
        resolver = ModulePathResolver(rename=weights_mapper, skip_prefixes=skip_prefixes)
        path, roots = os.path.abspath(lora_dir), [Path(lora_dir)]
        with open_adapter(path, roots, allow_pickled=allow_pickled) as files:
            reader = open_weights(files.weights, DEFAULT_BOUNDS)
            problems = Problems(DEFAULT_BOUNDS.problems_max)
            pairs = match_tensors(reader.tensors, peft_helper, resolver, None, problems).pairs
            touched = [pair.module for pair in pairs]
            others = [m for m in touched if suffixes([m]).isdisjoint(expected_lora_modules)]
            problems.add_each(AdapterDoesNotFit, "not among the expected modules", others)
            problems.raise_if_any()
            found = reader.read({name: WHOLE_TENSOR for pair in pairs for name in pair.factors()})
            files.check_unchanged()
        return cls.from_lora_tensors(
            lora_model_id,
            found.tensors,
            peft_helper,
            device=device,
            dtype=dtype,
            weights_mapper=weights_mapper,
        )

    @classmethod
    def from_matched(
        cls,
        lora_model_id: int,
        matched: MatchedTensors,
        tensors: Mapping[str, torch.Tensor],
        shards: Mapping[str, Shard] = MappingProxyType({}),
    ) -> "LoRAModel":
        """Return an adapter of checked tensors, which are shared, except for experts' B.

        For the modules in `shards` the tensors are the parts that it specifies.
        """
        loras = {
            pair.module: _weights(pair, tensors, shards.get(pair.module, WHOLE))
            for pair in matched.pairs
        }
        for column, pair, a, b in expert_stacks(matched.experts, tensors):
            loras[column.name] = LoRALayerWeights(
                column.name, pair.rank, pair.alpha, a, b, pair.scaling, column.shard, column.kind
            )
        rank = max(lora.rank for lora in loras.values())
        return cls(lora_model_id, rank, loras)


def _weights(
    pair: TensorPair, tensors: Mapping[str, torch.Tensor], shard: Shard
) -> LoRALayerWeights:
    a = tensors[pair.a]
    b = a.new_zeros(len(a)) if pair.b is None else tensors[pair.b]
    if pair.kind is ModuleKind.HEAD:
        b, shard = b[:, None], WHOLE
    return LoRALayerWeights(
        pair.module, pair.rank, pair.alpha, a, b, pair.scaling, shard, pair.kind
    )


def scaled(lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return `scaling * lora_b` in float32; `lora_b` itself if the scaling is 1."""
    return lora_b if scaling == 1 else lora_b.to(torch.float32) * scaling
