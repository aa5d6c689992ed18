"""What launchers share: a layer's tables on the device, scratch memory, and the checks of operands.

What it is: host code around the kernels. What it is not: a choice of tile sizes; that is `plans`.
One rule: a launcher that returns has been given what its kernel can read.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.kernels.gpu.tile_configs import ExpandPlan, ShrinkPlan
from engine.kernels.operands import GroupBounds, Groups, LoRASlices
from engine.layout import ALIGNMENT_BYTES, power_of_two

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
"""What activations and weights may be."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One wrapped layer as kernels read it.

    operands: data, offsets, ranks, and the layer's own [slices, 3] int64 table of column, first
    output and outputs. unit: the elements in 128 bytes of the arena.
    """

    operands: tuple[Tensor, Tensor, Tensor, Tensor]
    directory_stride: int
    in_features: int
    out_features: tuple[int, ...]
    unit: int

    @property
    def slices(self) -> int:
        """How many slices the layer has."""
        return len(self.out_features)

    @property
    def width(self) -> int:
        """All slices' outputs."""
        return sum(self.out_features)

    def blocks(self, block_n: int) -> int:
        """The blocks of `block_n` outputs, each slice cut for itself."""
        return sum(-(-width // block_n) for width in self.out_features)

    def out_unit(self, offset: int) -> int:
        """The largest power of two up to 16 that divides where every slice begins and ends."""
        return math.gcd(16, offset, *self.out_features)


class Layers:
    """Each layer's `Layer`, made when it is first seen and kept as long as the layer."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[LoRASlices, Layer] = WeakKeyDictionary()
        self._ranks: WeakKeyDictionary[LoRASlices, tuple[int, int]] = WeakKeyDictionary()

    def of(self, weights: LoRASlices) -> Layer:
        """What kernels read of `weights`."""
        layer = self._known.get(weights)
        if layer is None:
            layer = self._known[weights] = _layer(weights)
        return layer

    def rank_of(self, weights: LoRASlices) -> int:
        """The highest rank that any slot has in this layer now."""
        directory = weights.directory
        edition, rank = self._ranks.get(weights, (-1, 0))
        if edition != directory.edition.number:
            rank = int(directory.host_ranks[:, list(weights.columns)].amax())
            self._ranks[weights] = (directory.edition.number, rank)
        return rank


class Workspace:
    """Float32 memory for what lies between two launches, kept for the next call.

    A buffer that has become too small is kept too, because a captured graph may write there; each
    is at least twice the one before, so all together take at most twice the last.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """An unfilled contiguous tensor of this shape; the next one lies over it."""
        size = math.prod(shape)
        if not self._buffers or len(self._buffers[-1]) < size:
            room = power_of_two(max(size, 1 << 16))
            # Tensors made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._buffers.append(torch.empty(room, dtype=torch.float32, device=device))
        return self._buffers[-1][:size].view(shape)


def tiles_of(groups: Groups, height: int) -> Tensor:
    """The batch's table of tiles of that height: [bound, 3] int64."""
    for tiles in groups.tiles:
        if tiles.height == height:
            return tiles.table
    known = [tiles.height for tiles in groups.tiles]
    raise ValueError(f"a plan has tiles of {height} rows; groups are cut to {known}")


def block_k_of(block_k: int, x: Tensor, layer: Layer) -> int:
    """A plan's block of inputs for these dtypes: half of it where either has four bytes."""
    widest = max(x.element_size(), layer.operands[0].element_size())
    return block_k if widest == 2 else block_k // 2


def shrink_constants(plan: ShrinkPlan, x: Tensor, layer: Layer) -> dict[str, int]:
    """What a shrink's kernel is compiled for."""
    return {
        **sum_constants(plan, layer),
        "BLOCK_K": block_k_of(plan.block_k, x, layer),
        "num_stages": plan.stages,
    }


def sum_constants(plan: ShrinkPlan, layer: Layer) -> dict[str, int]:
    """What the kernel that sums a shrink's parts is compiled for."""
    return {
        "UNIT": layer.unit,
        "SPLITS": plan.splits,
        "BLOCK_M": plan.height,
        "BLOCK_R": plan.block_r,
        "num_warps": plan.warps,
    }


def expand_constants(
    plan: ExpandPlan, parts: Tensor, layer: Layer, offset: int = 0
) -> dict[str, int]:
    """What an expand's kernel is compiled for; parts: [splits, ...]."""
    return {
        "UNIT": layer.unit,
        "SPLITS": len(parts),
        "OUT_UNIT": layer.out_unit(offset),
        "BLOCK_M": plan.height,
        "BLOCK_N": plan.block_n,
        "BLOCK_R": plan.block_r,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


def check_operands(layer: Layer, rows: Tensor, rank: int, bounds: GroupBounds) -> None:
    """Raise ValueError for dtypes that kernels don't read, and for ranks above the scratch's."""
    for name, tensor in (("activations", rows), ("weights", layer.operands[0])):
        if tensor.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise ValueError(f"{name} are {tensor.dtype}; Triton kernels read {known}")
    if rank > bounds.rank:
        raise ValueError(
            f"a slot holds rank {rank}; the batch's groups were made for ranks up to {bounds.rank}"
        )


def _layer(weights: LoRASlices) -> Layer:
    directory = weights.directory
    firsts = accumulate(weights.out_features, initial=0)
    table = list(zip(weights.columns, firsts, weights.out_features, strict=False))
    with torch.inference_mode(False):
        on_device = torch.tensor(table, dtype=torch.int64, device=directory.data.device)
    return Layer(
        operands=(directory.data, directory.offsets, directory.ranks, on_device),
        directory_stride=directory.offsets.stride(0),
        in_features=weights.in_features,
        out_features=weights.out_features,
        unit=ALIGNMENT_BYTES // directory.data.dtype.itemsize,
    )
