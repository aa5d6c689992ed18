"""Where in a blob, and so in the arena, each matrix of an adapter lies.

What it is: arithmetic on shapes, ranks and item sizes. What it is not: memory. One rule: the layout
is a function of these alone, so its size is known before a byte is read.

For every module-slice that the adapter touches, in the directory's order: A `[rank, in]`, then B
`[out, rank]`, both row-major, each starting on a multiple of 128 bytes. One offset serves both,
because where B starts follows from A's shape. Offsets are in elements, not bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

ALIGNMENT_BYTES: Final = 128
"""Every matrix in a blob and in the arena starts on a multiple of this."""

ABSENT: Final = -1
"""The offset of a module-slice that an adapter does not touch."""


@dataclass(frozen=True)
class ModuleShape:
    """One module-slice that adapters can touch: its place in the model and in the directory.

    `name` is the full path in the model (`model.layers.0.self_attn.q_proj`); `index` is its column
    in the directory, counted from 0 without gaps; `transposed` says that the base layer stores its
    weight as `[in, out]`. A packed layer has one entry for each of its slices.
    """

    name: str
    in_features: int
    out_features: int
    index: int
    transposed: bool = False


def aligned_elements(elements: int, dtype: torch.dtype) -> int:
    """So many elements, rounded up to a multiple of 128 bytes."""
    alignment = ALIGNMENT_BYTES // dtype.itemsize
    return -(-elements // alignment) * alignment


def a_elements(rank: int, in_features: int, dtype: torch.dtype) -> int:
    """The elements from where A `[rank, in_features]` starts to where its B starts."""
    return aligned_elements(rank * in_features, dtype)


def slice_elements(rank: int, shape: ModuleShape, dtype: torch.dtype) -> int:
    """The elements that one module-slice takes at this rank, its padding included."""
    behind_a = a_elements(rank, shape.in_features, dtype)
    return behind_a + aligned_elements(shape.out_features * rank, dtype)


def blob_bytes(ranks: Mapping[str, int], modules: Iterable[ModuleShape], dtype: torch.dtype) -> int:
    """The size of the blob that staging makes of an adapter with these ranks, module by module."""
    touched = [shape for shape in modules if shape.name in ranks]
    elements = sum(slice_elements(ranks[shape.name], shape, dtype) for shape in touched)
    return elements * dtype.itemsize
