"""Host code shared by all launchers: a layer's tables, scratch memory, constants and checks."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from loradock.engine.kernels.gpu.tile_configs import ExpandConfig, ShrinkConfig
from loradock.engine.kernels.operands import GroupBounds, Groups, LoRASlices
from loradock.engine.layout import ALIGNMENT_BYTES, next_power_of_two

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""The supported dtypes of activations and weights."""


@dataclass(frozen=True, slots=True)
class LayerOperands:
    """One wrapped layer as kernels read it.

    tables: data, offsets and ranks of the directory, and the layer's [slices, 3] int64 table of
    column, first output and number of outputs. unit: the elements in 128 bytes of the arena.
    """

    tables: tuple[Tensor, Tensor, Tensor, Tensor]
    directory_stride: int
    in_features: int
    out_features: tuple[int, ...]
    unit: int

    @property
    def slice_count(self) -> int:
        """The number of slices."""
        return len(self.out_features)

    def blocks(self, block_n: int) -> int:
        """Return the number of blocks of `block_n` outputs; every slice starts a new block."""
        return sum(-(-n // block_n) for n in self.out_features)

    @property
    def out_unit(self) -> int:
        """The largest power of two up to 16 that divides every slice's bounds."""
        return math.gcd(16, *self.out_features)


class LayerOperandCache:
    """The `LayerOperands` of every layer, created on first use and kept as long as the layer."""

    def __init__(self) -> None:
        self._operands: WeakKeyDictionary[LoRASlices, LayerOperands] = WeakKeyDictionary()

    def operands_of(self, slices: LoRASlices) -> LayerOperands:
        """Return what kernels read of `slices`."""
        operands = self._operands.get(slices)
        if operands is None:
            operands = self._operands[slices] = _operands_of(slices)
        return operands


class Workspace:
    """Float32 scratch memory between two launches, reused by the next call.

    Outgrown buffers are kept, because a captured graph may write to them. Each is at least twice as
    large as the one before, so together they use at most twice the memory of the last.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return an unfilled contiguous tensor, valid until the next call."""
        size = math.prod(shape)
        if not self._buffers or len(self._buffers[-1]) < size:
            capacity = next_power_of_two(max(size, 1 << 16))
            # Tensors created in inference mode can't be written outside of it.
            with torch.inference_mode(False):
                self._buffers.append(torch.empty(capacity, dtype=torch.float32, device=device))
        return self._buffers[-1][:size].view(shape)


def tile_table(groups: Groups, block_m: int) -> Tensor:
    """Return the batch's table of tiles of `block_m` rows: [bound, 3] int64."""
    for tiles in groups.tiles:
        if tiles.block_m == block_m:
            return tiles.table
    known = [tiles.block_m for tiles in groups.tiles]
    raise ValueError(f"no tiles of {block_m} rows; groups are divided into tiles of {known}")


def block_k_of(block_k: int, x: Tensor, operands: LayerOperands) -> int:
    """Return `block_k` for these dtypes: half of it if either has four bytes."""
    widest = max(x.element_size(), operands.tables[0].element_size())
    return block_k if widest == 2 else block_k // 2


def shrink_constants(config: ShrinkConfig, x: Tensor, operands: LayerOperands) -> dict[str, int]:
    """Return the compile-time constants of a shrink kernel."""
    return {
        **sum_constants(config, operands),
        "BLOCK_K": block_k_of(config.block_k, x, operands),
        "num_stages": config.stages,
    }


def sum_constants(config: ShrinkConfig, operands: LayerOperands) -> dict[str, int]:
    """Return the compile-time constants of the kernels that sum a shrink's splits."""
    return {
        "UNIT": operands.unit,
        "SPLITS": config.splits,
        "BLOCK_M": config.block_m,
        "BLOCK_R": config.block_r,
        "num_warps": config.warps,
    }


def expand_constants(
    config: ExpandConfig, parts: Tensor, operands: LayerOperands
) -> dict[str, int]:
    """Return the compile-time constants of an expand kernel; parts: [splits, ...]."""
    return {
        "UNIT": operands.unit,
        "SPLITS": len(parts),
        "OUT_UNIT": operands.out_unit,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_R": config.block_r,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def check_operands(operands: LayerOperands, rows: Tensor, rank: int, bounds: GroupBounds) -> None:
    """Raise ValueError for unsupported dtypes, and for ranks above the batch's bound."""
    for name, tensor in (("activations", rows), ("weights", operands.tables[0])):
        if tensor.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise ValueError(f"{name} are {tensor.dtype}; Triton kernels read {known}")
    if rank > bounds.rank:
        raise ValueError(
            f"a slot holds rank {rank}; the batch's groups were made for ranks up to {bounds.rank}"
        )


def _operands_of(slices: LoRASlices) -> LayerOperands:
    directory = slices.directory
    offsets = accumulate(slices.out_features, initial=0)
    table = list(zip(slices.columns, offsets, slices.out_features, strict=False))
    with torch.inference_mode(False):
        on_device = torch.tensor(table, dtype=torch.int64, device=directory.data.device)
    return LayerOperands(
        tables=(directory.data, directory.offsets, directory.ranks, on_device),
        directory_stride=directory.offsets.stride(0),
        in_features=slices.in_features,
        out_features=slices.out_features,
        unit=ALIGNMENT_BYTES // directory.data.dtype.itemsize,
    )
