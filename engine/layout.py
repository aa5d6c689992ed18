"""Shapes of module-slices, and the offsets of an adapter's matrices in a blob and in the arena.

The layout is a function of shapes, ranks and item size alone, so that its size is known before a
byte is read.

It holds every module-slice that the adapter touches, in the order of directory columns: A, then B,
both row-major, in the shapes of their `ModuleKind` and `Shard`. Each starts on a multiple of 128
bytes. Offsets count elements, not bytes. One offset serves both matrices, because A's shape
determines where B starts; a slice with two directory columns has B's offset in the second.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from loradock.engine.submatrix import Submatrix

ALIGNMENT_BYTES: Final = 128
"""Every matrix in a blob and in the arena starts on a multiple of this."""

SAVED_SUFFIX: Final = ".saved"
"""The end of the name of a slice that replaces the module before it whole."""

AFFINE_SUFFIX: Final = ".affine"
"""The end of the name of a slice with a scale and a shift per output of the module before it."""

TOKENS_SUFFIX: Final = ".tokens"
"""The end of the name of a slice that replaces rows of the embedding or head before it."""

TOKEN_ID_DIGITS: Final = 3
"""An arena has a token id as this many digits of base 256, which all its dtypes hold exactly."""

ABSENT: Final = -1
"""The offset of a module-slice that an adapter does not touch."""


class ModuleKind(Enum):
    """The layout of a module-slice's A and B.

    LINEAR: A `[rank, in]`, B `[out, rank]`. EMBEDDING: A `[in, rank]`, one row per token, so that
    a lookup reads one row; B `[out, rank]`. EXPERTS: A `[experts, rank, in]`, B
    `[experts, out, rank]`. HEAD: a layer's own weights, which replace the base's; A is the weight
    `[out, in]`, B the bias `[out, 1]`, and the rank is always 1. TOKENS: rows that replace those of
    single tokens; A is the rows `[tokens, in]`, B the ids' digits `[tokens, 3]` in ascending order
    of ids (`token_digits`), and the number of tokens is in the place of a rank.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    EXPERTS = "experts"
    HEAD = "head"
    TOKENS = "tokens"


@dataclass(frozen=True)
class Shard:
    """The part of a module-slice's A `[rank, in]` and B `[out, rank]` that this process keeps.

    `a_columns`: the columns of A; None: all. `b_rows`: the rows of B, in the order in which they
    are kept; None: all. `rank_parts`, `rank_part`: A's rows are divided among `rank_parts`
    processes, and this one keeps every `rank_parts`-th row, from row `rank_part`. The parts of a
    row's shrunk activations then interleave to the whole for every adapter rank. `experts`: the
    experts whose matrices are kept of a stack; None: all.
    """

    a_columns: range | None = None
    b_rows: tuple[range, ...] | None = None
    rank_parts: int = 1
    rank_part: int = 0
    experts: range | None = None

    def a_rank(self, rank: int) -> int:
        """Return the number of A's rows that are kept; ValueError if they can't be divided."""
        if rank % self.rank_parts:
            raise ValueError(
                f"rank {rank} can't be divided among {self.rank_parts} processes; fully sharded "
                f"adapters need a rank that {self.rank_parts} divides, or fully_sharded_loras off"
            )
        return rank // self.rank_parts

    def a_width(self, in_features: int) -> int:
        """Return the number of A's columns that are kept."""
        return in_features if self.a_columns is None else len(self.a_columns)

    def b_height(self, out_features: int) -> int:
        """Return the number of B's rows that are kept."""
        return out_features if self.b_rows is None else sum(map(len, self.b_rows))

    def a_submatrix(self, rank: int) -> Submatrix:
        """Return the part of A `[rank, in]` that is kept; raises like `a_rank`."""
        self.a_rank(rank)
        is_divided = self.rank_parts > 1
        rows = (range(self.rank_part, rank, self.rank_parts),) if is_divided else None
        return Submatrix(rows, self.a_columns)

    def b_submatrix(self) -> Submatrix:
        """Return the part of B `[out, rank]` that is kept."""
        return Submatrix(self.b_rows)

    def select_a(self, lora_a: torch.Tensor) -> torch.Tensor:
        """Return the kept part of A `[rank, in]`, or of a stack; raises like `a_rank`."""
        return self.a_submatrix(lora_a.shape[-2]).select(self._kept_experts(lora_a))

    def select_b(self, lora_b: torch.Tensor) -> torch.Tensor:
        """Return the kept part of B `[out, rank]`, or of a stack: a view if it is one range."""
        return self.b_submatrix().select(self._kept_experts(lora_b))

    def _kept_experts(self, stack: torch.Tensor) -> torch.Tensor:
        return stack if self.experts is None else stack[self.experts.start : self.experts.stop]


WHOLE: Final = Shard()
"""The shard of a process that keeps the whole module-slice."""


class DirectoryEntry(NamedTuple):
    """The content of one directory column for one slot."""

    column: int
    offset: int
    rank: int


class ParameterRows(NamedTuple):
    """The rows of a slice's outputs in a model parameter that holds several slices.

    `parameter`: its full path. `rows`: of the parameter's outputs, and so of a B for all of it.
    """

    parameter: str
    rows: range


@dataclass(frozen=True)
class ModuleShape:
    """One module-slice that adapters can touch, and its columns of the directory.

    `name`: the full path in the model (`model.layers.0.self_attn.q_proj`). `in_features`,
    `out_features`: of the whole module. `index`: its first directory column; columns count from 0
    without gaps. `transposed`: the base layer stores its weight as `[in, out]`. A packed layer has
    one `ModuleShape` per slice. `experts`: 1 for every kind but EXPERTS. `shard`: what this process
    keeps of a LINEAR or EXPERTS slice; `a_shape` and `b_shape` are those of the kept part.
    `parameter_rows`: for experts' gate and up if one model parameter holds both. `is_optional`:
    for a module that few adapters replace whole; it counts for no default size. `kernel`: the sizes
    of a convolution's kernel; `in_features` counts every value under it.
    """

    name: str
    in_features: int
    out_features: int
    index: int
    transposed: bool = False
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1
    shard: Shard = WHOLE
    parameter_rows: ParameterRows | None = None
    is_optional: bool = False
    kernel: tuple[int, ...] = ()

    @property
    def input_sizes(self) -> list[int]:
        """The sizes of one row of A in an adapter: the inputs, or channels and kernel."""
        return [self.in_features // math.prod(self.kernel), *self.kernel]

    @property
    def kept_experts(self) -> range:
        """The experts whose matrices this process keeps."""
        return range(self.experts) if self.shard.experts is None else self.shard.experts

    @property
    def parameter(self) -> str:
        """The path of the model parameter that the slice is, or is a part of."""
        if self.parameter_rows is not None:
            return self.parameter_rows.parameter
        return self.name if self.kind is ModuleKind.EXPERTS else f"{self.name}.weight"

    @property
    def columns(self) -> int:
        """The number of its directory columns.

        Two, for A and for B, if A's rows are divided among processes, because A then has
        another rank than B; else one for both.
        """
        return 1 if self.shard.rank_parts == 1 else 2

    def a_shape(self, rank: int) -> tuple[int, ...]:
        """Return A's shape in a blob and in the arena for an adapter of this rank."""
        match self.kind:
            case ModuleKind.LINEAR:
                return self._a_matrix(rank)
            case ModuleKind.EMBEDDING:
                return (self.in_features, rank)
            case ModuleKind.EXPERTS:
                return (len(self.kept_experts), *self._a_matrix(rank))
            case ModuleKind.HEAD:
                return (self.out_features, self.in_features)
            case ModuleKind.TOKENS:
                return (rank, self.in_features)

    def b_shape(self, rank: int) -> tuple[int, ...]:
        """Return B's shape in a blob and in the arena for an adapter of this rank."""
        if self.kind is ModuleKind.TOKENS:
            return (rank, TOKEN_ID_DIGITS)
        matrix = (self.shard.b_height(self.out_features), rank)
        return (len(self.kept_experts), *matrix) if self.kind is ModuleKind.EXPERTS else matrix

    def _a_matrix(self, rank: int) -> tuple[int, int]:
        return (self.shard.a_rank(rank), self.shard.a_width(self.in_features))

    def check_fit(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Raise ValueError unless A and B have this module-slice's shapes, at B's rank."""
        rank = int(b.shape[-1])
        if a.shape != self.a_shape(rank) or b.shape != self.b_shape(rank) or not rank:
            raise ValueError(
                f"{self.name} has A {list(a.shape)} and B {list(b.shape)}; "
                f"rank {rank} needs A {list(self.a_shape(rank))} and B "
                f"{list(self.b_shape(rank))}, and the rank is at least 1"
            )


def token_digits(ids: torch.Tensor) -> torch.Tensor:
    """Return the digits of token ids, the highest first: [tokens] int64 to [tokens, 3] float32."""
    places = _digit_places(ids.device)
    return (ids[:, None] // places % 256).to(torch.float32)


def token_ids_of(digits: torch.Tensor) -> torch.Tensor:
    """Return the token ids of `token_digits`, [tokens] int64, from any floating dtype."""
    return (digits.long() * _digit_places(digits.device)).sum(1)


def _digit_places(device: torch.device) -> torch.Tensor:
    powers = range(TOKEN_ID_DIGITS - 1, -1, -1)
    return torch.tensor([256**power for power in powers], device=device)


def directory_entries(
    shape: ModuleShape, start: int, rank: int, dtype: torch.dtype
) -> tuple[DirectoryEntry, ...]:
    """Return the directory's content for a module-slice of this rank whose A starts at `start`."""
    first = DirectoryEntry(shape.index, start, shape.shard.a_rank(rank))
    if shape.columns == 1:
        return (first,)
    b_start = start + aligned_elements(math.prod(shape.a_shape(rank)), dtype)
    return (first, DirectoryEntry(shape.index + 1, b_start, rank))


def aligned_elements(elements: int, dtype: torch.dtype) -> int:
    """Return `elements` rounded up to a multiple of 128 bytes."""
    alignment = ALIGNMENT_BYTES // dtype.itemsize
    return -(-elements // alignment) * alignment


def matrices_of(
    data: torch.Tensor, start: int, rank: int, shape: ModuleShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B of a module-slice of this rank whose A starts at `start`, as views of data."""
    a_shape, b_shape = shape.a_shape(rank), shape.b_shape(rank)
    b_start = start + aligned_elements(math.prod(a_shape), data.dtype)
    a = data[start : start + math.prod(a_shape)]
    b = data[b_start : b_start + math.prod(b_shape)]
    return a.view(a_shape), b.view(b_shape)


def slice_elements(rank: int, shape: ModuleShape, dtype: torch.dtype) -> int:
    """Return the elements of one module-slice at this rank, padding included."""
    both = (shape.a_shape(rank), shape.b_shape(rank))
    return sum(aligned_elements(math.prod(matrix), dtype) for matrix in both)


def rank_parts_max(modules: Iterable[ModuleShape]) -> int:
    """Return the largest number of processes among which a module's rank is divided; 1 for none."""
    return max((shape.shard.rank_parts for shape in modules), default=1)


def columns_of_one_adapter(modules: Iterable[ModuleShape]) -> list[ModuleShape]:
    """Return the module-slices that one adapter can fill together.

    Where a parameter has a slice for all of it and slices for its parts, these are the parts, which
    need more bytes together. Optional slices are left out.
    """
    modules = [shape for shape in modules if not shape.is_optional]
    divided = {s.parameter_rows.parameter for s in modules if s.parameter_rows is not None}
    return [shape for shape in modules if shape.name not in divided]


def directory_columns(modules: Iterable[ModuleShape]) -> int:
    """Return the number of columns of a directory of these modules."""
    return sum(shape.columns for shape in modules)


def sorted_by_column(modules: Iterable[ModuleShape]) -> tuple[ModuleShape, ...]:
    """Return the modules in directory order; ValueError for columns with gaps."""
    ordered = tuple(sorted(modules, key=lambda shape: shape.index))
    firsts = accumulate((shape.columns for shape in ordered), initial=0)
    if any(shape.index != first for shape, first in zip(ordered, firsts, strict=False)):
        raise ValueError("module indices must count columns from 0 without gaps or repetitions")
    return ordered


def blob_bytes(ranks: Mapping[str, int], modules: Iterable[ModuleShape], dtype: torch.dtype) -> int:
    """Return the size of the staged blob of an adapter with these ranks by module."""
    touched = [shape for shape in modules if shape.name in ranks]
    elements = sum(slice_elements(ranks[shape.name], shape, dtype) for shape in touched)
    return elements * dtype.itemsize


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` and at least 1."""
    return 1 << max(0, number - 1).bit_length()
