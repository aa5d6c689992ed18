"""One adapter in host memory: its modules' A and B.

What it is: tensors with their rank and scaling. What it is not: a reader of files, or a layout for
the device. One rule: shapes are checked when a module's weights are made, so a pair that exists
can be multiplied.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from engine.adapters.compatibility import Fitted, ModelSide, fit, suffixes
from engine.adapters.expert_stacks import expert_parts, expert_stacks
from engine.adapters.files.directory import open_adapter
from engine.adapters.files.formats import open_weights
from engine.adapters.files.problems import Problems
from engine.adapters.files.weights_file import value_range
from engine.adapters.finite_values import check_values
from engine.adapters.module_paths import Naming, Rename
from engine.adapters.pairs import Pair
from engine.adapters.peft_config import PEFTHelper
from engine.config import DEFAULT_BOUNDS
from engine.errors import AdapterDoesNotFit
from engine.layout import WHOLE, ModuleKind, ModuleShape, Shard
from engine.submatrix import ALL


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a request wants; `lora_int_id` is at least 1, because 0 is the base model.

    `base_model_name` is told, not compared. `load_inplace`: read `lora_path` again although the id
    is known; it is an order for one time, so whoever carried it out goes on with `loaded()`.
    `is_3d_lora_weight`: whether expert weights are fused; None lets the files say it. Raises
    `ValueError`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool | None = None

    def __post_init__(self) -> None:
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id!r}; an integer of at least 1")
        if not self.lora_name:
            raise ValueError("lora_name is empty; give the adapter a name")
        if self.load_inplace and not self.lora_path:
            raise ValueError(f"load_inplace is True for {self.lora_name!r} without a lora_path")

    def loaded(self) -> "LoRARequest":
        """This request once its files were read: the same, and no order to read them again."""
        return replace(self, load_inplace=False)


@dataclass
class LoRALayerWeights:
    """One module's weights: `lora_a` `[rank, in]`, `lora_b` `[out, rank]`.

    The module's delta is `scaling * lora_b @ lora_a`; `scaling` 0 takes `lora_alpha / rank`. Of a
    sharded module both are the part that `shard` says. For kind EXPERTS both have the experts in
    front. For HEAD they are a whole layer's weight `[out, in]` and bias `[out, 1]`, of rank 1.
    Raises `AdapterDoesNotFit` where the shapes contradict each other or the rank.
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

    @property
    def input_dim(self) -> int:
        """The width that A reads."""
        return self.lora_a.shape[-1]

    @property
    def output_dim(self) -> int:
        """The width that B writes."""
        return self.lora_b.shape[-2]

    def cut(self, shard: Shard) -> "LoRALayerWeights":
        """What a process keeps of whole weights, in memory of its own where that is less."""
        if shard == WHOLE:
            return self
        a, b = shard.cut_a(self.lora_a), shard.cut_b(self.lora_b)
        return replace(self, lora_a=a.clone(), lora_b=b.clone(), shard=shard)

    @property
    def size_bytes(self) -> int:
        """What both tensors take."""
        return self.lora_a.nbytes + self.lora_b.nbytes

    def optimize(self) -> "LoRALayerWeights":
        """Fold the scaling into B, in float32 and rounded once; this one, with scaling 1."""
        if self.scaling != 1:
            self.lora_b = scaled(self.lora_b, self.scaling).to(self.lora_b.dtype)
            self.scaling = 1.0
        return self


@dataclass
class PackedLoRALayerWeights:
    """The weights of a packed layer, one a slice; None for a child the adapter doesn't touch."""

    module_name: str
    loras: tuple[LoRALayerWeights | None, ...]

    @classmethod
    def pack(
        cls, module_name: str, loras: Sequence[LoRALayerWeights | None]
    ) -> "PackedLoRALayerWeights":
        """The children's weights, shared; ValueError where the adapter touches none of them."""
        if not any(loras):
            raise ValueError(f"the adapter touches no child of {module_name}")
        return cls(module_name, tuple(loras))

    @property
    def rank(self) -> int:
        """The highest rank of a child."""
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
        """What all tensors take."""
        return sum(lora.size_bytes for lora in self.loras if lora)

    def optimize(self) -> "PackedLoRALayerWeights":
        """Fold each scaling into its B; this one."""
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
        """What the tensors take."""
        return sum(lora.size_bytes for lora in self.loras.values())

    def clone(self, lora_model_id: int) -> "LoRAModel":
        """The same weights under another id; the tensors are shared."""
        return LoRAModel(lora_model_id, self.rank, dict(self.loras))

    def cut(self, modules: Mapping[str, ModuleShape]) -> "LoRAModel":
        """What a process keeps of a whole adapter; `modules` has all that the adapter touches."""
        loras = {name: lora.cut(modules[name].shard) for name, lora in self.loras.items()}
        return replace(self, loras=loras)

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        """A module's weights; None where the adapter doesn't touch it."""
        return self.loras.get(module_name)

    def check_lora_name(self, module_name: str) -> bool:
        """Whether the adapter touches a module."""
        return module_name in self.loras

    def get_packed(
        self, module_name: str, children: Sequence[str]
    ) -> PackedLoRALayerWeights | None:
        """The weights of a packed layer's children; None where the adapter touches none."""
        loras = [self.get_lora(child) for child in children]
        return PackedLoRALayerWeights.pack(module_name, loras) if any(loras) else None

    @classmethod
    def from_lora_tensors(  # noqa: PLR0913 - a signature that people know
        cls,
        lora_model_id: int,
        tensors: Mapping[str, torch.Tensor],
        peft_helper: PEFTHelper,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        weights_mapper: Rename | None = None,
        skip_prefixes: Iterable[str] = (),
        model: ModelSide | None = None,
    ) -> "LoRAModel":
        """An adapter from tensors in memory, named as in PEFT's files.

        Tensors that have the device and the dtype (None: any) are shared, not copied. With `model`
        everything is checked that reading files into an engine checks; without it what needs no
        model is. Raises one `EngineError` with all that is wrong with names, shapes, dtypes or
        values.
        """
        problems = Problems(DEFAULT_BOUNDS.problems_max)
        naming = Naming(rename=weights_mapper, skip_prefixes=skip_prefixes)
        if model is not None:
            naming = model.naming(weights_mapper, skip_prefixes)
        fitted = fit(tensors, peft_helper, naming, model, problems).whole()
        problems.raise_if_any()
        wanted = [name for pair in fitted.stored() for name in pair.factors()]
        ranges = {name: value_range(tensors[name]) for name in wanted}
        check_values(fitted.stored(), ranges, dtype or torch.float32, problems)
        problems.raise_if_any()
        placed = {name: tensors[name].to(device, dtype) for name in wanted}
        parts = expert_parts(fitted.experts).items()
        placed |= {name: part.cut(placed[name]) for name, part in parts}
        return cls.from_fitted(lora_model_id, fitted, placed)

    @classmethod
    def from_local_checkpoint(  # noqa: PLR0913 - a signature that people know
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
        """An adapter from a directory that the caller trusts to name; links below are refused.

        `expected_lora_modules` are full paths or dot-bounded suffixes; another module is refused.
        Widths are not known here and not checked: `read_adapter` is the way into an engine.
        Raises like `from_lora_tensors` and `adapter_files.open_adapter`.
        """
        naming = Naming(rename=weights_mapper, skip_prefixes=skip_prefixes)
        path, roots = os.path.abspath(lora_dir), [Path(lora_dir)]
        with open_adapter(path, roots, allow_pickled=allow_pickled) as files:
            reader = open_weights(files.weights, DEFAULT_BOUNDS)
            problems = Problems(DEFAULT_BOUNDS.problems_max)
            pairs = fit(reader.tensors, peft_helper, naming, None, problems).pairs
            touched = [pair.module for pair in pairs]
            other = [m for m in touched if suffixes([m]).isdisjoint(expected_lora_modules)]
            problems.add_each(AdapterDoesNotFit, "not among the expected modules", other)
            problems.raise_if_any()
            found = reader.read({name: ALL for pair in pairs for name in pair.factors()})
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
    def from_fitted(
        cls,
        lora_model_id: int,
        fitted: Fitted,
        tensors: Mapping[str, torch.Tensor],
        shards: Mapping[str, Shard] = MappingProxyType({}),
    ) -> "LoRAModel":
        """An adapter from what was checked; the tensors are shared, but for experts' B.

        Of the modules that `shards` names they are the parts that it says.
        """
        loras = {
            pair.module: _weights(pair, tensors, shards.get(pair.module, WHOLE))
            for pair in fitted.pairs
        }
        for column, pair, a, b in expert_stacks(fitted.experts, tensors):
            loras[column.name] = LoRALayerWeights(
                column.name, pair.rank, pair.alpha, a, b, pair.scaling, column.shard, column.kind
            )
        rank = max(lora.rank for lora in loras.values())
        return cls(lora_model_id, rank, loras)


def _weights(pair: Pair, tensors: Mapping[str, torch.Tensor], shard: Shard) -> LoRALayerWeights:
    a = tensors[pair.a]
    b = a.new_zeros(len(a)) if pair.b is None else tensors[pair.b]
    if pair.kind is ModuleKind.HEAD:
        b, shard = b[:, None], WHOLE
    return LoRALayerWeights(
        pair.module, pair.rank, pair.alpha, a, b, pair.scaling, shard, pair.kind
    )


def scaled(lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """`scaling * lora_b` in float32; `lora_b` itself where the scaling is 1."""
    return lora_b if scaling == 1 else lora_b.to(torch.float32) * scaling
