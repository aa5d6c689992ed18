"""Arenas, adapters and copiers for tests: small, of odd sizes, with copies that a test controls."""

from dataclasses import dataclass, field

import torch

from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import Blob, ModuleShape, stage

SHAPES = [(16, 16), (16, 40), (40, 7), (3, 64), (128, 32)]
MODULES = [ModuleShape(f"layers.{i}", *shape, i) for i, shape in enumerate(SHAPES)]
SLOTS = 8
CAPACITY_BYTES = 16 * 1024
Matrices = dict[int, tuple[torch.Tensor, torch.Tensor]]


class CopyFailedError(Exception):
    pass


@dataclass(eq=False)
class ManualCopy:
    """A copy that ends when the test sets `done`, or in `wait`."""

    target: torch.Tensor
    source: torch.Tensor
    fails: bool
    done: bool = False

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        if not self.done:
            self.done = True
            length = len(self.source) // 2 if self.fails else len(self.source)
            self.target[:length].copy_(self.source[:length])
        if self.fails:
            raise CopyFailedError


@dataclass
class ManualCopier:
    """A copier whose `start` and copies fail on demand; moves fail by number, from 0."""

    copies: list[ManualCopy] = field(default_factory=list)
    start_fails: bool = False
    copy_fails: bool = False
    moves: int = 0
    failing_moves: range = range(0)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> ManualCopy:
        if self.start_fails:
            raise CopyFailedError
        self.copies.append(ManualCopy(target, source, self.copy_fails))
        return self.copies[-1]

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        first, last = sorted([target, source], key=torch.Tensor.data_ptr)
        assert first.data_ptr() + first.nbytes <= last.data_ptr(), "source and target overlap"
        assert len(target) == len(source)
        self.moves += 1
        if self.moves - 1 in self.failing_moves:
            target[: len(target) // 2].copy_(source[: len(source) // 2])
            raise CopyFailedError
        target.copy_(source)

    def close(self) -> None:
        pass


def make_arena(
    dtype: torch.dtype, copier: ManualCopier | None = None, device: str = "cpu"
) -> Arena:
    """Return an arena full of NaN."""
    arena = Arena(SLOTS, MODULES, CAPACITY_BYTES, dtype, device, copier)
    arena.data.view(torch.uint8).fill_(0xFF)
    return arena


def make_blob(ranks: dict[int, int], seed: int, dtype: torch.dtype) -> tuple[Blob, Matrices]:
    """Return a staged adapter with these ranks by column, and its matrices in the arena."""
    generator = torch.Generator().manual_seed(seed)
    loras, expected = {}, {}
    for index, rank in ranks.items():
        shape = MODULES[index]
        a = torch.randn(rank, shape.in_features, generator=generator)
        b = torch.randn(shape.out_features, rank, generator=generator)
        loras[shape.name] = LoRALayerWeights(shape.name, rank, 2.0 * rank, a, b)
        expected[index] = (a.to(dtype), (b * 2).to(dtype))
    model = LoRAModel(1, max(ranks.values()), loras)
    return stage(model, MODULES, dtype), expected


def matrices_in(arena: Arena, slot: int) -> Matrices:
    """Return the matrices that a slot holds, by column."""
    found = ((index, arena.weights(slot, index)) for index in range(len(MODULES)))
    return {index: pair for index, pair in found if pair is not None}


def assert_same(found: Matrices, expected: Matrices) -> None:
    assert found.keys() == expected.keys()
    for index, pair in expected.items():
        for ours, theirs in zip(found[index], pair, strict=True):
            assert torch.equal(ours.cpu(), theirs), f"column {index}"
