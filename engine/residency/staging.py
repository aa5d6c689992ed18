"""An adapter as the device will hold it: one contiguous host blob.

What it is: the one place that writes the layout. What it is not: a decision who is staged, or a
copy to the device. One rule: a blob has every number exactly as the arena will have it, so that
activating is one copy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.adapters.lora_model import LoRALayerWeights, LoRAModel, scaled
from engine.host_memory import allocate_host
from engine.layout import (
    ABSENT,
    ALIGNMENT_BYTES,
    ModuleKind,
    ModuleShape,
    a_elements,
    aligned_elements,
    blob_bytes,
    directory_columns,
    entries,
    slice_elements,
)

__all__ = [
    "ABSENT",
    "ALIGNMENT_BYTES",
    "Blob",
    "ModuleShape",
    "a_elements",
    "blob_bytes",
    "slice_elements",
    "stage",
    "unpack",
]


@dataclass(frozen=True, eq=False)
class Blob:
    """A staged adapter: its data, and where in it each module-slice lies.

    `data`: 1-D, contiguous, on the host. `offsets` `[columns]` int64, in elements, `ABSENT` where
    the adapter has nothing; `ranks` `[columns]` int32, 0 there. The scaling is folded into B.
    """

    data: torch.Tensor
    offsets: torch.Tensor
    ranks: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """What the blob takes, on the host and on the device alike; a multiple of 128."""
        return self.data.nbytes

    @property
    def is_pinned(self) -> bool:
        """Whether the data is page-locked."""
        return self.data.is_pinned()

    def to_pageable(self) -> "Blob":
        """The same blob in pageable memory: itself where it is already."""
        return self._copied(pin=False) if self.is_pinned else self

    def to_pinned(self) -> "Blob":
        """The same blob in page-locked memory: itself where it is already."""
        return self if self.is_pinned else self._copied(pin=True)

    def _copied(self, pin: bool) -> "Blob":
        data = allocate_host((self.data.numel(),), self.data.dtype, pin).copy_(self.data)
        return Blob(data, self.offsets, self.ranks)


def stage(model: LoRAModel, modules: Sequence[ModuleShape], dtype: torch.dtype, pin: bool) -> Blob:
    """Lay an adapter out in one host blob of `dtype`, page-locked where `pin` says so.

    `modules` are all that the directory has columns for; the adapter's must be among them. `model`
    holds this process's part of each, and is only read. B is multiplied by the scaling in float32
    and rounded once. Raises `HostOutOfMemory`, and `KeyError` for a module without an entry.
    """
    columns = directory_columns(modules)
    offsets = torch.full((columns,), ABSENT, dtype=torch.int64)
    ranks = torch.zeros(columns, dtype=torch.int32)
    loras = dict(model.loras)
    size_bytes = blob_bytes({name: lora.rank for name, lora in loras.items()}, modules, dtype)
    data = allocate_host((size_bytes // dtype.itemsize,), dtype, pin)
    start = 0
    for shape in sorted(modules, key=lambda shape: shape.index):
        lora = loras.pop(shape.name, None)
        if lora is not None:
            for entry in entries(shape, start, lora.rank, dtype):
                offsets[entry.column], ranks[entry.column] = entry.offset, entry.rank
            start = _write_slice(data, start, lora, shape)
    if loras:
        raise KeyError(f"modules that the directory has no column for: {sorted(loras)}")
    return Blob(data, offsets, ranks)


def unpack(blob: Blob, modules: Sequence[ModuleShape], lora_model_id: int) -> LoRAModel:
    """An adapter as it lies in a blob: its tensors are views, and the scaling is in B already."""
    loras = {}
    for shape in modules:
        start = int(blob.offsets[shape.index])
        # B's column tells the adapter's own rank; A may have been dealt out.
        rank = int(blob.ranks[shape.index + shape.columns - 1])
        if start != ABSENT:
            behind_a = start + aligned_elements(math.prod(shape.a_shape(rank)), blob.data.dtype)
            a = _read_matrix(blob.data, start, shape.a_shape(rank))
            b = _read_matrix(blob.data, behind_a, shape.b_shape(rank))
            a = a.T if shape.kind is ModuleKind.EMBEDDING else a
            loras[shape.name] = LoRALayerWeights(
                shape.name, rank, rank, a, b, 1.0, shape.shard, shape.kind
            )
    return LoRAModel(lora_model_id, int(blob.ranks.max()), loras)


def _read_matrix(data: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return data[start : start + math.prod(shape)].view(shape)


def _write_slice(data: torch.Tensor, start: int, lora: LoRALayerWeights, shape: ModuleShape) -> int:
    """Write A and B at `start` of the blob; the element behind B's padding."""
    is_looked_up = shape.kind is ModuleKind.EMBEDDING
    start = _write_matrix(data, start, lora.lora_a.T if is_looked_up else lora.lora_a)
    return _write_matrix(data, start, scaled(lora.lora_b, lora.scaling))


def _write_matrix(data: torch.Tensor, start: int, matrix: torch.Tensor) -> int:
    """Write one matrix, and zeros up to the next multiple of 128 bytes; where that is."""
    end = start + matrix.numel()
    data[start:end].view(matrix.shape).copy_(matrix)
    aligned_end = start + aligned_elements(matrix.numel(), data.dtype)
    if aligned_end > end:
        data[end:aligned_end].zero_()
    return aligned_end
