"""Batches for every implementation of the LoRA operations, and the expected result in float64.

Weights are in an arena of NaN. An implementation takes part in all kernel tests by its name in
NAMES. Triton's kernels take part where they can run: in Triton's interpreter (TRITON_INTERPRET=1,
which `tests/engine/kernels/test_triton.py` sets for a separate process), or compiled on a CUDA
device. The interpreter is slow, so it gets fewer cases.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels import Kernels, choose_kernels
from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.kernels.expert_groups import ExpertGroups
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.layout import ModuleKind, ModuleShape, aligned_elements, slice_elements
from loradock.engine.punica import LoRAMapping, PunicaWrapper

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_COMPILED = os.environ.get("LORADOCK_TEST_COMPILED") == "1"

if IS_INTERPRETED:
    from tests.support.kernels.interpreted_bfloat16 import correct_products

    correct_products()

NAMES = ("triton",) if IS_INTERPRETED or IS_COMPILED else ("reference", "cpu")
"""The implementations that all tests run with."""

REPEATS = 2 if IS_INTERPRETED else 20
"""The number of batches for a property."""

ERRORS_MAX = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""The largest relative norm of the error per dtype; float64 is for the reference only."""

Weights = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""(slot, slice) -> A and B, in the shapes of the kind."""


def dtypes(name: str) -> list[torch.dtype]:
    """Return the dtypes that an implementation must support."""
    if IS_INTERPRETED:
        # Float16 differs from float32 and bfloat16 in no branch of a kernel; test_offsets has it.
        return [torch.float32, torch.bfloat16]
    return [dtype for dtype in ERRORS_MAX if name == "reference" or dtype != torch.float64]


NAMES_AND_DTYPES = [(name, dtype) for name in NAMES for dtype in dtypes(name)]


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Within, PyTorch fills new memory with NaN, including scratch memory."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def kernels_of(name: str, batch_invariant: bool = False) -> Kernels:
    kernels = choose_kernels("cpu", name, batch_invariant)
    return run_on_device(kernels) if IS_COMPILED else kernels


def run_on_device(kernels: Kernels, device: str = "cuda") -> Kernels:
    """Return the same kernels for operands on the CPU, which are copied to the device and back."""

    def on_device(operation):
        def run(y, x, slices: LoRASlices, groups: Groups, *rest) -> None:
            there = move(y, device), move(x, device)
            getattr(kernels, operation)(
                *there, layer_on(slices, device), groups_on(groups, device), *rest
            )
            y.copy_(there[0])

        return run

    def groups_on_device(groups: ExpertGroups) -> ExpertGroups:
        return replace(groups, pairs=groups.pairs.to(device), keys=groups.keys.to(device))

    def experts_on_device(operation):
        def run(ys, x, slices: LoRASlices, groups: ExpertGroups) -> None:
            there = [move(y, device) for y in ys]
            operands = move(x, device), layer_on(slices, device), groups_on_device(groups)
            getattr(kernels, operation)(there, *operands)
            for y, result in zip(ys, there, strict=True):
                y.copy_(result)

        return run

    def experts_shrink(y, x, slices: LoRASlices, groups: ExpertGroups) -> None:
        there = move(y, device)
        operands = move(x, device), layer_on(slices, device), groups_on_device(groups)
        kernels.experts_shrink(there, *operands)
        y.copy_(there)

    names = ("shrink", "expand", "linear", "embedding")
    replaced = {name: on_device(name) for name in names}
    replaced |= {name: experts_on_device(name) for name in ("experts", "experts_expand")}
    return kernels._replace(**replaced, experts_shrink=experts_shrink, plan_linear=None)


def move(tensor: Tensor, device: str) -> Tensor:
    """Return a copy with the same strides and NaN between a view's rows; meta tensors stay meta."""
    if tensor.device.type != "cpu":
        return tensor
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    filler = torch.nan if tensor.is_floating_point() else 0
    around = torch.full((max(0, size),), filler, dtype=tensor.dtype, device=device)
    copy = around.as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor) if tensor.numel() else copy


def layer_on(slices: LoRASlices, device: str) -> LoRASlices:
    host = slices.directory
    moved = SlotDirectory(host.data.to(device), *host.offsets.shape)
    columns = torch.arange(moved.offsets.shape[1])
    for slot in range(len(host.host_offsets)):
        moved.write(slot, columns, host.host_offsets[slot], host.host_ranks[slot])
    return LoRASlices(
        *(moved, slices.columns, slices.in_features, slices.out_features),
        *(slices.kind, slices.experts),
    )


def groups_on(groups: Groups, device: str) -> Groups:
    """Return a batch's tables on the device; each has the capacity of its bounds, as always."""
    padded = torch.zeros(groups.bounds.tokens, dtype=torch.int64, device=device)
    padded[: len(groups.rows)] = groups.rows.to(device)
    return replace(
        groups,
        rows=padded[: len(groups.rows)],
        token_slots=groups.token_slots.to(device),
        tiles=tuple(tiles._replace(table=tiles.table.to(device)) for tiles in groups.tiles),
    )


class Case(NamedTuple):
    """One layer and one batch. `rows[t]` is the slot of row t, -1 for the base model.

    x: [tokens, in_features], or [tokens] int64 for an embedding. y: [tokens, sum of widths].
    """

    weights: Weights
    slices: LoRASlices
    rows: list[int]
    x: Tensor
    y: Tensor

    @property
    def groups(self) -> Groups:
        return groups_of(self.rows)

    @property
    def base_rows(self) -> list[int]:
        return [row for row, slot in enumerate(self.rows) if slot < 0]

    def only(self, rows: list[int]) -> "Case":
        """Return the same layer with these rows, in this order."""
        return self._replace(rows=[self.rows[row] for row in rows], x=self.x[rows], y=self.y[rows])


class Shape(NamedTuple):
    """The shape of a case; a rank is drawn from `ranks` for each slot and slice."""

    in_features: int
    widths: tuple[int, ...]
    slots: int
    ranks: tuple[int, ...]
    absent: float = 0.2
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1

    def module(self, width: int, index: int = 0) -> ModuleShape:
        """Return the directory entry of a slice of this width."""
        return ModuleShape("", self.in_features, width, index, kind=self.kind, experts=self.experts)


def groups_of(rows: list[int]) -> Groups:
    """Return the groups that a Punica wrapper creates for these slots."""
    slots = max(rows, default=0) + 1
    punica = PunicaWrapper(torch.device("cpu"), 512, kernels_of("reference"))
    ids = [slot + 1 for slot in rows]
    punica.update_metadata(LoRAMapping(ids, []), list(range(1, slots + 1)))
    assert punica.groups is not None
    return punica.groups


def mixed_rows(random: Random, tokens: int, slots: int) -> list[int]:
    """Return slots in random order, with the last slot and the base if there are enough rows."""
    rows = ([slots - 1, -1] + [random.randint(-1, slots - 1) for _ in range(tokens)])[:tokens]
    random.shuffle(rows)
    return rows


def make_case(
    shape: Shape,
    rows: list[int],
    dtype: torch.dtype,
    seed: int,
    weights_dtype: torch.dtype | None = None,
) -> Case:
    """Create normally distributed weights and inputs; a delta is about as large as its output."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    weights: Weights = {}
    kept = weights_dtype or dtype
    for slot in range(shape.slots):
        for index, width in enumerate(shape.widths):
            rank = random.choice(shape.ranks)
            if random.random() >= shape.absent:
                module = shape.module(width)
                a = torch.randn(module.a_shape(rank), generator=generator).to(kept)
                b = torch.randn(module.b_shape(rank), generator=generator) / rank**0.5
                weights[slot, index] = (a, b.to(kept))
    slices = lay_out(weights, shape, kept)
    y = torch.randn(len(rows), sum(shape.widths), generator=generator).to(dtype)
    if shape.kind is ModuleKind.EMBEDDING:
        x = torch.randint(shape.in_features, (len(rows),), generator=generator)
    else:
        scaled = torch.randn(len(rows), shape.in_features, generator=generator)
        x = (scaled / shape.in_features**0.5).to(dtype)
    return Case(weights, slices, rows, x, y)


def lay_out(weights: Weights, shape: Shape, dtype: torch.dtype) -> LoRASlices:
    """Write the weights to an arena that is NaN elsewhere, and return the layer's slices."""
    unit = aligned_elements(1, dtype)
    modules = [shape.module(width, index) for index, width in enumerate(shape.widths)]
    sizes = {
        key: slice_elements(b.shape[-1], modules[key[1]], dtype) for key, (_, b) in weights.items()
    }
    data = torch.full((unit + sum(sizes.values()),), torch.nan, dtype=dtype)
    directory = SlotDirectory(data, shape.slots, len(modules) + 1)
    start = unit
    for (slot, index), (a, b) in weights.items():
        b_start = start + aligned_elements(a.numel(), dtype)
        data[start : start + a.numel()] = a.flatten()
        data[b_start : b_start + b.numel()] = b.flatten()
        # Column 0 belongs to another layer, so that a kernel that ignores `columns` is detected.
        directory.offsets[slot, index + 1] = start
        directory.ranks[slot, index + 1] = b.shape[-1]
        start += sizes[slot, index]
    columns = tuple(range(1, len(modules) + 1))
    return LoRASlices(
        directory, columns, shape.in_features, shape.widths, shape.kind, shape.experts
    )


def expected_output(case: Case, scale: float = 1.0) -> Tensor:
    """Return `y` plus every row's delta, in float64, row by row."""
    result = case.y.double().clone()
    for row, slot in enumerate(case.rows):
        first = 0
        for index, width in enumerate(case.slices.out_features):
            if (slot, index) in case.weights:
                a, b = (matrix.double() for matrix in case.weights[slot, index])
                looked_up = case.slices.kind is ModuleKind.EMBEDDING
                shrunk = a[case.x[row]] if looked_up else a @ case.x[row].double()
                result[row, first : first + width] += scale * (b @ shrunk)
            first += width
    return result


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the relative norm of the difference; NaN if anything was left unwritten."""
    if not expected.numel():
        return 0.0
    return float((found.double() - expected).norm() / expected.norm())


class Batch(NamedTuple):
    """The shape and tokens of a case in a table of tests."""

    shape: Shape
    tokens: int

    def case(self, dtype: torch.dtype, weights_dtype: torch.dtype | None = None) -> Case:
        seed = 1000 * self.tokens + self.shape.slots
        rows = mixed_rows(Random(seed), self.tokens, self.shape.slots)
        return make_case(self.shape, rows, dtype, seed, weights_dtype)


SHAPES = (
    Shape(48, (80,), 1, (16,), 0.0),
    Shape(33, (7, 50, 1), 3, (1, 3, 8, 24)),
    Shape(130, (24, 100), 8, (16,), 0.1),
    Shape(100, (72, 72, 72), 65, (1, 2, 5, 16, 31)),
)
"""No powers of two, unequal slices, absent modules, odd ranks, and up to 65 slots."""

LARGE_RANKS = Shape(96, (56, 40), 4, (1, 7, 64, 320, 511, 512), 0.1)

BATCHES = [
    *(Batch(shape, tokens) for tokens in (0, 1, 2, 7, 64, 511) for shape in SHAPES),
    Batch(LARGE_RANKS, 37),
]
if IS_INTERPRETED:
    BATCHES = [
        batch
        for batch in BATCHES
        if batch.tokens * batch.shape.slots < 190 and batch.shape is not LARGE_RANKS
    ] + [Batch(Shape(40, (24, 9), 3, (1, 40, 72), 0.1), 37)]
EMBEDDING_BATCHES = [
    Batch(Shape(301, widths, slots, ranks, 0.2, ModuleKind.EMBEDDING), tokens)
    for tokens in (0, 1, 2, 7, 64, 511)
    for widths, slots, ranks in [((48,), 1, (16,)), ((37,), 65, (1, 3, 8, 31, 512))]
    if not IS_INTERPRETED or tokens * slots < 100
]


def batch_name(batch: Batch) -> str:
    """Return a test's id."""
    shape = batch.shape
    return f"{batch.tokens} tokens, {shape.slots} slots, {shape.in_features} to {shape.widths}"
