"""Staging: an adapter packed into one contiguous host blob, in the layout of the arena.

A blob has every byte exactly as the arena will have it, so that activating is one copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loradock.engine.adapters.layer_weights import LoRALayerWeights, highest_rank, scaled
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.layout import (
    ABSENT,
    ModuleKind,
    ModuleShape,
    aligned_elements,
    blob_bytes,
    directory_columns,
    directory_entries,
)
from loradock.engine.memory import allocate_host
from loradock.engine.residency.pinned import PinnedMemory


@dataclass(frozen=True, eq=False)
class Blob:
    """A staged adapter: its data, and the offset in it of each module-slice.

    `data`: 1-D, contiguous, on the host. `offsets`: [columns] int64, in elements, `ABSENT` if
    the adapter has nothing. `ranks`: [columns] int32, 0 there. The scaling is folded into B.
    """

    data: torch.Tensor
    offsets: torch.Tensor
    ranks: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """The blob's size, on the host and on the device; a multiple of 128."""
        return self.data.nbytes

    @property
    def is_pinned(self) -> bool:
        """True if the data is page-locked."""
        return self.data.is_pinned()

    def to_pageable(self) -> "Blob":
        """Return the blob in pageable memory: itself if it already is."""
        return self._copied(None) if self.is_pinned else self

    def to_pinned(self, memory: PinnedMemory) -> "Blob":
        """Return the blob in page-locked memory: itself if it already is."""
        return self if self.is_pinned else self._copied(memory)

    def _copied(self, pinned: PinnedMemory | None) -> "Blob":
        data = _allocate(self.data.numel(), self.data.dtype, pinned).copy_(self.data)
        return Blob(data, self.offsets, self.ranks)


def stage(
    model: LoRAModel,
    modules: Sequence[ModuleShape],
    dtype: torch.dtype,
    pinned: PinnedMemory | None = None,
) -> Blob:
    """Pack an adapter into one host blob of `dtype`, in page-locked memory or in pageable.

    `modules`: every module-slice of the directory; those of the adapter must be among them.
    `model` has this process's part of each, and is not changed. B is multiplied by the scaling in
    float32 and rounded once. Raises `HostOutOfMemory`, and `KeyError` for a module without a
    column.
    """
    columns = directory_columns(modules)
    offsets = torch.full((columns,), ABSENT, dtype=torch.int64)
    ranks = torch.zeros(columns, dtype=torch.int32)
    loras = dict(model.loras)
    size_bytes = blob_bytes({name: lora.rank for name, lora in loras.items()}, modules, dtype)
    data = _allocate(size_bytes // dtype.itemsize, dtype, pinned)
    start = 0
    for shape in sorted(modules, key=lambda shape: shape.index):
        lora = loras.pop(shape.name, None)
        if lora is not None:
            for entry in directory_entries(shape, start, lora.rank, dtype):
                offsets[entry.column], ranks[entry.column] = entry.offset, entry.rank
            start = _write_slice(data, start, lora, shape)
    if loras:
        raise KeyError(f"modules without a column in the directory: {sorted(loras)}")
    return Blob(data, offsets, ranks)


def _allocate(elements: int, dtype: torch.dtype, pinned: PinnedMemory | None) -> torch.Tensor:
    return allocate_host((elements,), dtype) if pinned is None else pinned.allocate(elements, dtype)


def unpack(blob: Blob, modules: Sequence[ModuleShape], lora_model_id: int) -> LoRAModel:
    """Return the adapter in a blob: its tensors are views, and the scaling is folded into B."""
    loras = {}
    for shape in modules:
        start = int(blob.offsets[shape.index])
        # The adapter's own rank is in B's column; under full sharding A has only a part of it.
        rank = int(blob.ranks[shape.index + shape.columns - 1])
        if start != ABSENT:
            b_start = start + aligned_elements(math.prod(shape.a_shape(rank)), blob.data.dtype)
            a = _read_matrix(blob.data, start, shape.a_shape(rank))
            b = _read_matrix(blob.data, b_start, shape.b_shape(rank))
            a = a.T if shape.kind is ModuleKind.EMBEDDING else a
            loras[shape.name] = LoRALayerWeights(
                shape.name, rank, rank, a, b, 1.0, shape.shard, shape.kind
            )
    return LoRAModel(lora_model_id, highest_rank(loras.values()), loras)


def _read_matrix(data: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return data[start : start + math.prod(shape)].view(shape)


def _write_slice(data: torch.Tensor, start: int, lora: LoRALayerWeights, shape: ModuleShape) -> int:
    """Write A and B at element `start` of `data`; return the first element after B's padding."""
    is_embedding = shape.kind is ModuleKind.EMBEDDING
    start = _write_matrix(data, start, lora.lora_a.T if is_embedding else lora.lora_a)
    scaling = lora.scaling
    if lora.lora_b.dtype == data.dtype and torch.tensor(scaling, dtype=data.dtype) == scaling:
        # The product is rounded once too, without an intermediate tensor in float32.
        return _write_matrix(data, start, lora.lora_b, scaling)
    return _write_matrix(data, start, scaled(lora.lora_b, scaling))


def _write_matrix(
    data: torch.Tensor, start: int, matrix: torch.Tensor, scaling: float = 1.0
) -> int:
    """Write a matrix, and zeros up to the next multiple of 128 bytes; return that element."""
    end = start + matrix.numel()
    written = data[start:end].view(matrix.shape)
    if scaling == 1.0:
        written.copy_(matrix)
    else:
        torch.mul(matrix, scaling, out=written)
    aligned_end = start + aligned_elements(matrix.numel(), data.dtype)
    if aligned_end > end:
        data[end:aligned_end].zero_()
    return aligned_end
