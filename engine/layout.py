"""Where in a blob, and so in the arena, each matrix of an adapter lies.

What it is: arithmetic on shapes, ranks and item sizes. What it is not: memory. One rule: the layout
is a function of these alone, so its size is known before a byte is read.

For every module-slice that the adapter touches, in the directory's order: A, then B, both
row-major, in the shapes of their `ModuleKind`, each starting on a multiple of 128 bytes. One offset
serves both, because where B starts follows from A's shape. Offsets are in elements, not bytes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

ALIGNMENT_BYTES: Final = 128
"""Every matrix in a blob and in the arena starts on a multiple of this."""

ABSENT: Final = -1
"""The offset of a module-slice that an adapter does not touch."""


class ModuleKind(Enum):
    """How a module-slice's A and B lie.

    LINEAR: A `[rank, in]`, B `[out, rank]`. EMBEDDING: A `[in, rank]`, a row for each token, so
    that looking one up reads one row; B `[out, rank]`. EXPERTS: A `[experts, rank, in]`, B
    `[experts, out, rank]`.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    EXPERTS = "experts"


@dataclass(frozen=True)
class ModuleShape:
    """One module-slice that adapters can touch: its place in the model and in the directory.

    `name` is the full path in the model (`model.layers.0.self_attn.q_proj`); `index` is its column
    in the directory, counted from 0 without gaps; `transposed` says that the base layer stores its
    weight as `[in, out]`. A packed layer has one entry for each of its slices. `experts` is 1 for
    every kind but EXPERTS.
    """

    name: str
    in_features: int
    out_features: int
    index: int
    transposed: bool = False
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1

    def a_shape(self, rank: int) -> tuple[int, ...]:
        """A's shape in a blob and in the arena."""
        match self.kind:
            case ModuleKind.LINEAR:
                return (rank, self.in_features)
            case ModuleKind.EMBEDDING:
                return (self.in_features, rank)
            case ModuleKind.EXPERTS:
                return (self.experts, rank, self.in_features)

    def b_shape(self, rank: int) -> tuple[int, ...]:
        """B's shape in a blob and in the arena."""
        matrix = (self.out_features, rank)
        return (self.experts, *matrix) if self.kind is ModuleKind.EXPERTS else matrix


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


def blob_bytes(ranks: Mapping[str, int], modules: Iterable[ModuleShape], dtype: torch.dtype) -> int:
    """The size of the blob that staging makes of an adapter with these ranks, module by module."""
    touched = [shape for shape in modules if shape.name in ranks]
    elements = sum(slice_elements(ranks[shape.name], shape, dtype) for shape in touched)
    return elements * dtype.itemsize
