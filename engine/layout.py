"""Where in a blob, and so in the arena, each matrix of an adapter lies.

What it is: arithmetic on shapes, ranks and item sizes. What it is not: memory. One rule: the layout
is a function of these alone, so its size is known before a byte is read.

For every module-slice that the adapter touches, in the directory's order: A, then B, both
row-major, in the shapes of their `ModuleKind` and `Shard`, each starting on a multiple of 128
bytes. One offset serves both, because where B starts follows from A's shape; where they have two
columns of the directory, B's own says the same. Offsets are in elements, not bytes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from engine.submatrix import Part

ALIGNMENT_BYTES: Final = 128
"""Every matrix in a blob and in the arena starts on a multiple of this."""

ABSENT: Final = -1
"""The offset of a module-slice that an adapter does not touch."""


class ModuleKind(Enum):
    """How a module-slice's A and B lie.

    LINEAR: A `[rank, in]`, B `[out, rank]`. EMBEDDING: A `[in, rank]`, a row for each token, so
    that looking one up reads one row; B `[out, rank]`. EXPERTS: A `[experts, rank, in]`, B
    `[experts, out, rank]`. HEAD: no product but a layer's own weights, in place of the base's; A is
    the weight `[out, in]`, B the bias `[out, 1]`, and the rank is always 1.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    EXPERTS = "experts"
    HEAD = "head"


@dataclass(frozen=True)
class Shard:
    """The part of a module-slice's A `[rank, in]` and B `[out, rank]` that this process keeps.

    `a_columns`: which columns of A, None for all. `b_rows`: which rows of B, in the order in which
    they are kept, None for all. `rank_parts`, `rank_part`: A's rows are dealt out to so many
    processes, and this one gets every `rank_parts`-th, from row `rank_part` on; so the parts of a
    row's shrunk activations interleave to the whole, whatever rank its adapter has. `experts`:
    which experts' matrices are kept of a stack, None for all.
    """

    a_columns: range | None = None
    b_rows: tuple[range, ...] | None = None
    rank_parts: int = 1
    rank_part: int = 0
    experts: range | None = None

    def a_rank(self, rank: int) -> int:
        """How many of A's rows are kept, of an adapter of this rank; ValueError where uneven."""
        if rank % self.rank_parts:
            raise ValueError(
                f"rank {rank} can't be dealt out to {self.rank_parts} processes; fully sharded "
                f"adapters need a rank that {self.rank_parts} divides, or fully_sharded_loras off"
            )
        return rank // self.rank_parts

    def a_width(self, in_features: int) -> int:
        """How many of A's columns are kept."""
        return in_features if self.a_columns is None else len(self.a_columns)

    def b_height(self, out_features: int) -> int:
        """How many of B's rows are kept."""
        return out_features if self.b_rows is None else sum(map(len, self.b_rows))

    def a_part(self, rank: int) -> Part:
        """Which part of A `[rank, in]` is kept; ValueError where `a_rank` raises one."""
        self.a_rank(rank)
        is_dealt = self.rank_parts > 1
        rows = (range(self.rank_part, rank, self.rank_parts),) if is_dealt else None
        return Part(rows, self.a_columns)

    def b_part(self) -> Part:
        """Which part of B `[out, rank]` is kept."""
        return Part(self.b_rows)

    def cut_a(self, lora_a: torch.Tensor) -> torch.Tensor:
        """The part of A `[rank, in]`, or of a stack; ValueError where `a_rank` raises one."""
        return self.a_part(lora_a.shape[-2]).cut(self._own_experts(lora_a))

    def cut_b(self, lora_b: torch.Tensor) -> torch.Tensor:
        """The part of B `[out, rank]`, or of a stack; as a view where its rows lie together."""
        return self.b_part().cut(self._own_experts(lora_b))

    def _own_experts(self, stack: torch.Tensor) -> torch.Tensor:
        return stack if self.experts is None else stack[self.experts.start : self.experts.stop]


WHOLE: Final = Shard()
"""What a process keeps that shares with nobody."""


class Entry(NamedTuple):
    """What the directory says in one column of a slot's row."""

    column: int
    offset: int
    rank: int


class Within(NamedTuple):
    """Where a slice's outputs lie in a parameter of the model that holds several slices.

    `parameter`: its full path. `rows`: of its outputs, so of a B that is for all of it.
    """

    parameter: str
    rows: range


@dataclass(frozen=True)
class ModuleShape:
    """One module-slice that adapters can touch: its place in the model and in the directory.

    `name` is the full path in the model (`model.layers.0.self_attn.q_proj`); `in_features` and
    `out_features` are the whole module's; `index` is its first column in the directory, counted
    from 0 without gaps; `transposed` says that the base layer stores its weight as `[in, out]`. A
    packed layer has one entry for each of its slices. `experts` is 1 for every kind but EXPERTS.
    `shard` is what this process keeps of a LINEAR or EXPERTS slice, and what `a_shape` and
    `b_shape` tell. `within`: for experts' gate and up, where the model has them in one parameter.
    """

    name: str
    in_features: int
    out_features: int
    index: int
    transposed: bool = False
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1
    shard: Shard = WHOLE
    within: Within | None = None

    @property
    def kept_experts(self) -> range:
        """Whose matrices this process keeps."""
        return range(self.experts) if self.shard.experts is None else self.shard.experts

    @property
    def parameter(self) -> str:
        """The path of the model's own parameter that it is, or is a part of."""
        if self.within is not None:
            return self.within.parameter
        return self.name if self.kind is ModuleKind.EXPERTS else f"{self.name}.weight"

    @property
    def columns(self) -> int:
        """How many columns of the directory it takes.

        Two, for A and for B, where A's rows are dealt out, because A then has another rank than B;
        else one for both.
        """
        return 1 if self.shard.rank_parts == 1 else 2

    def a_shape(self, rank: int) -> tuple[int, ...]:
        """A's shape in a blob and in the arena, of an adapter of this rank."""
        match self.kind:
            case ModuleKind.LINEAR:
                return self._a_matrix(rank)
            case ModuleKind.EMBEDDING:
                return (self.in_features, rank)
            case ModuleKind.EXPERTS:
                return (len(self.kept_experts), *self._a_matrix(rank))
            case ModuleKind.HEAD:
                return (self.out_features, self.in_features)

    def b_shape(self, rank: int) -> tuple[int, ...]:
        """B's shape in a blob and in the arena, of an adapter of this rank."""
        matrix = (self.shard.b_height(self.out_features), rank)
        return (len(self.kept_experts), *matrix) if self.kind is ModuleKind.EXPERTS else matrix

    def _a_matrix(self, rank: int) -> tuple[int, int]:
        return (self.shard.a_rank(rank), self.shard.a_width(self.in_features))

    def check_fit(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Raise ValueError unless A and B have this module-slice's shapes, at B's rank."""
        rank = int(b.shape[-1])
        if a.shape != self.a_shape(rank) or b.shape != self.b_shape(rank) or not rank:
            raise ValueError(
                f"A {list(a.shape)} and B {list(b.shape)} for {self.name}; "
                f"for rank {rank} A {list(self.a_shape(rank))} and B "
                f"{list(self.b_shape(rank))} are needed, and at least rank 1"
            )


def entries(shape: ModuleShape, start: int, rank: int, dtype: torch.dtype) -> tuple[Entry, ...]:
    """What the directory says of a module-slice of this rank whose A starts at `start`."""
    first = Entry(shape.index, start, shape.shard.a_rank(rank))
    if shape.columns == 1:
        return (first,)
    b_start = start + aligned_elements(math.prod(shape.a_shape(rank)), dtype)
    return (first, Entry(shape.index + 1, b_start, rank))


def aligned_elements(elements: int, dtype: torch.dtype) -> int:
    """So many elements, rounded up to a multiple of 128 bytes."""
    alignment = ALIGNMENT_BYTES // dtype.itemsize
    return -(-elements // alignment) * alignment


def a_elements(rank: int, in_features: int, dtype: torch.dtype) -> int:
    """The elements from where A `[rank, in_features]` starts to where its B starts."""
    return aligned_elements(rank * in_features, dtype)


def slice_elements(rank: int, shape: ModuleShape, dtype: torch.dtype) -> int:
    """The elements that one module-slice takes at this rank, its padding included."""
    both = (shape.a_shape(rank), shape.b_shape(rank))
    return sum(aligned_elements(math.prod(matrix), dtype) for matrix in both)


def rank_parts_of(modules: Iterable[ModuleShape]) -> int:
    """To how many processes an adapter's ranks are dealt out, wherever they are; 1 for nowhere."""
    return max((shape.shard.rank_parts for shape in modules), default=1)


def directory_columns(modules: Iterable[ModuleShape]) -> int:
    """How many columns a directory of these modules has."""
    return sum(shape.columns for shape in modules)


def in_order_of_columns(modules: Iterable[ModuleShape]) -> tuple[ModuleShape, ...]:
    """The modules as the directory has them; raises ValueError for columns that leave gaps."""
    ordered = tuple(sorted(modules, key=lambda shape: shape.index))
    firsts = accumulate((shape.columns for shape in ordered), initial=0)
    if any(shape.index != first for shape, first in zip(ordered, firsts, strict=False)):
        raise ValueError("module indices must count columns from 0 without gaps or repetitions")
    return ordered


def blob_bytes(ranks: Mapping[str, int], modules: Iterable[ModuleShape], dtype: torch.dtype) -> int:
    """The size of the blob that staging makes of an adapter with these ranks, module by module."""
    touched = [shape for shape in modules if shape.name in ranks]
    elements = sum(slice_elements(ranks[shape.name], shape, dtype) for shape in touched)
    return elements * dtype.itemsize


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, and not below 1."""
    return 1 << max(0, number - 1).bit_length()
