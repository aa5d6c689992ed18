"""Batches for every implementation of the LoRA operations, and the sum written out as the oracle.

What it is: weights in an arena of NaN, a batch's slots, and a float64 result made row by row. What
it is not: a test. One rule: an implementation joins all kernel tests by its name in NAMES.

Triton's kernels join where they can run: under Triton's interpreter (TRITON_INTERPRET=1, which
`tests/engine/kernels/test_triton` sets for a process of its own), or compiled, on a CUDA device. The
interpreter is slow and has no bfloat16, so it gets fewer cases.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels import Kernels, choose_kernels
from engine.kernels.directory import Edition
from engine.kernels.expert_groups import ExpertGroups
from engine.kernels.operands import Directory, Groups, LoRASlices
from engine.layout import ABSENT, ModuleKind, ModuleShape, aligned_elements, slice_elements
from engine.punica import LoRAMapping, PunicaWrapper

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IS_COMPILED = os.environ.get("LORADOCK_TEST_COMPILED") == "1"

NAMES = ("triton",) if IS_INTERPRETED or IS_COMPILED else ("reference", "cpu")
"""The implementations that all tests run over."""

REPEATS = 2 if IS_INTERPRETED else 20
"""How many batches a property is tried on."""

ERRORS_MAX = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
"""The relative norm of the error that each dtype may have; float64 is the reference's alone."""

Weights = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""(slot, slice) -> A and B, in the shapes of the kind."""


def dtypes(name: str) -> list[torch.dtype]:
    """What an implementation has to be right in."""
    if IS_INTERPRETED:
        return [torch.float32, torch.float16]
    return [dtype for dtype in ERRORS_MAX if name == "reference" or dtype != torch.float64]


NAMES_AND_DTYPES = [(name, dtype) for name in NAMES for dtype in dtypes(name)]


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Within, PyTorch fills memory that nobody filled, scratch memory among it."""
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
    """The same kernels for operands on the CPU, which are brought to the device and back."""

    def brought(operation):
        def run(y, x, weights: LoRASlices, groups: Groups, *rest) -> None:
            there = move(y, device), move(x, device)
            getattr(kernels, operation)(
                *there, layer_on(weights, device), groups_on(groups, device), *rest
            )
            y.copy_(there[0])

        return run

    def brought_groups(groups: ExpertGroups) -> ExpertGroups:
        return replace(groups, pairs=groups.pairs.to(device), keys=groups.keys.to(device))

    def brought_experts(operation):
        def run(ys, x, weights: LoRASlices, groups: ExpertGroups) -> None:
            there = [move(y, device) for y in ys]
            operands = move(x, device), layer_on(weights, device), brought_groups(groups)
            getattr(kernels, operation)(there, *operands)
            for y, result in zip(ys, there, strict=True):
                y.copy_(result)

        return run

    def experts_shrink(y, x, weights: LoRASlices, groups: ExpertGroups) -> None:
        there = move(y, device)
        operands = move(x, device), layer_on(weights, device), brought_groups(groups)
        kernels.experts_shrink(there, *operands)
        y.copy_(there)

    names = ("shrink", "expand", "linear", "embedding")
    replaced = {name: brought(name) for name in names}
    replaced |= {name: brought_experts(name) for name in ("experts", "experts_expand")}
    return kernels._replace(**replaced, experts_shrink=experts_shrink)


def move(tensor: Tensor, device: str) -> Tensor:
    """A copy with the same strides; what lies between a view's rows is NaN. Meta stays meta."""
    if tensor.device.type != "cpu":
        return tensor
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    filler = torch.nan if tensor.is_floating_point() else 0
    around = torch.full((max(0, size),), filler, dtype=tensor.dtype, device=device)
    copy = around.as_strided(tensor.shape, tensor.stride())
    return copy.copy_(tensor) if tensor.numel() else copy


def layer_on(weights: LoRASlices, device: str) -> LoRASlices:
    directory = weights.directory
    tables = (directory.data, directory.offsets, directory.ranks)
    moved = Directory(*[table.to(device) for table in tables], *directory[3:])
    return LoRASlices(
        *(moved, weights.columns, weights.in_features, weights.out_features),
        *(weights.kind, weights.experts),
    )


def groups_on(groups: Groups, device: str) -> Groups:
    """A batch's tables on the device; each has the room of its bounds behind it, as always."""
    room = torch.zeros(groups.bounds.tokens, dtype=torch.int64, device=device)
    room[: len(groups.rows)] = groups.rows.to(device)
    return replace(
        groups,
        rows=room[: len(groups.rows)],
        token_slots=groups.token_slots.to(device),
        active=groups.active.to(device),
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
        """The same layer with some of the rows, in this order."""
        return self._replace(rows=[self.rows[row] for row in rows], x=self.x[rows], y=self.y[rows])


class Shape(NamedTuple):
    """What a case is made from; a rank is drawn from `ranks` for each slot and slice."""

    in_features: int
    widths: tuple[int, ...]
    slots: int
    ranks: tuple[int, ...]
    absent: float = 0.2
    kind: ModuleKind = ModuleKind.LINEAR
    experts: int = 1

    def module(self, width: int, index: int = 0) -> ModuleShape:
        """The column of a slice of this width."""
        return ModuleShape("", self.in_features, width, index, kind=self.kind, experts=self.experts)


def groups_of(rows: list[int]) -> Groups:
    """The groups that a Punica wrapper makes of these slots."""
    slots = max(rows, default=0) + 1
    punica = PunicaWrapper(torch.device("cpu"), 512, kernels_of("reference"))
    ids = [slot + 1 for slot in rows]
    punica.update_metadata(LoRAMapping(ids, []), list(range(1, slots + 1)))
    assert punica.groups is not None
    return punica.groups


def mixed_rows(random: Random, tokens: int, slots: int) -> list[int]:
    """Rows in any order; the last slot and the base are there where there is room."""
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
    """Signed normal weights and inputs; the delta is about as large as what it is added to."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    weights: Weights = {}
    kept = weights_dtype or dtype
    for slot in range(shape.slots):
        for place, width in enumerate(shape.widths):
            rank = random.choice(shape.ranks)
            if random.random() >= shape.absent:
                module = shape.module(width)
                a = torch.randn(module.a_shape(rank), generator=generator).to(kept)
                b = torch.randn(module.b_shape(rank), generator=generator) / rank**0.5
                weights[slot, place] = (a, b.to(kept))
    slices = lay_out(weights, shape, kept)
    y = torch.randn(len(rows), sum(shape.widths), generator=generator).to(dtype)
    if shape.kind is ModuleKind.EMBEDDING:
        x = torch.randint(shape.in_features, (len(rows),), generator=generator)
    else:
        scaled = torch.randn(len(rows), shape.in_features, generator=generator)
        x = (scaled / shape.in_features**0.5).to(dtype)
    return Case(weights, slices, rows, x, y)


def lay_out(weights: Weights, shape: Shape, dtype: torch.dtype) -> LoRASlices:
    """A directory and an arena that holds NaN wherever no weight lies."""
    unit = aligned_elements(1, dtype)
    modules = [shape.module(width, place) for place, width in enumerate(shape.widths)]
    sizes = {
        key: slice_elements(b.shape[-1], modules[key[1]], dtype) for key, (_, b) in weights.items()
    }
    data = torch.full((unit + sum(sizes.values()),), torch.nan, dtype=dtype)
    offsets = torch.full((shape.slots, len(modules) + 1), ABSENT, dtype=torch.int64)
    ranks = torch.zeros((shape.slots, len(modules) + 1), dtype=torch.int32)
    start = unit
    for (slot, place), (a, b) in weights.items():
        behind = start + aligned_elements(a.numel(), dtype)
        data[start : start + a.numel()] = a.flatten()
        data[behind : behind + b.numel()] = b.flatten()
        # Column 0 belongs to another layer, so that a kernel that ignores `columns` is seen.
        offsets[slot, place + 1], ranks[slot, place + 1] = start, b.shape[-1]
        start += sizes[slot, place]
    directory = Directory(data, offsets, ranks, offsets, ranks, Edition())
    columns = tuple(range(1, len(modules) + 1))
    return LoRASlices(
        directory, columns, shape.in_features, shape.widths, shape.kind, shape.experts
    )


def expected_output(case: Case, scale: float = 1.0) -> Tensor:
    """`y` plus every row's delta in float64, row by row."""
    result = case.y.double().clone()
    for row, slot in enumerate(case.rows):
        first = 0
        for place, width in enumerate(case.slices.out_features):
            if (slot, place) in case.weights:
                a, b = (matrix.double() for matrix in case.weights[slot, place])
                looked_up = case.slices.kind is ModuleKind.EMBEDDING
                shrunk = a[case.x[row]] if looked_up else a @ case.x[row].double()
                result[row, first : first + width] += scale * (b @ shrunk)
            first += width
    return result


def error_of(found: Tensor, expected: Tensor) -> float:
    """The relative norm of the difference; NaN where anything was left unwritten."""
    if not expected.numel():
        return 0.0
    return float((found.double() - expected).norm() / expected.norm())


class Batch(NamedTuple):
    """What a table test makes a case from."""

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
"""No power of two, unequal slices, absent modules, odd ranks, and as many as 65 slots."""

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
    """A test's id."""
    shape = batch.shape
    return f"{batch.tokens} tokens, {shape.slots} slots, {shape.in_features} to {shape.widths}"
