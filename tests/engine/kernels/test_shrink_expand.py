"""Shrink with an A without outputs, and expand with a B without inputs, as for striped ranks.

The columns of two ranks are in one arena, and the test performs the exchange.
"""

import pytest
import torch
from torch import Tensor

from engine.kernels.operands import LoRASlices
from engine.layout import ModuleShape, Shard
from engine.punica import LoRAMapping, PunicaWrapper
from engine.punica.wrapper import ShrinkExpand
from engine.residency.arena import Arena
from tests.support.engine.engine_examples import relative_error
from tests.support.kernels.kernel_cases import NAMES, kernels_of

IN, OUT, RANK_MAX, PARTS = 40, 24, 8, 2
RANKS = (4, 8)
SLOT_OF_ROW = (1, 0, -1, 1, 0, 0)


def shrink_expand_of(arena: Arena, first: int) -> ShrinkExpand:
    shrink = LoRASlices(arena.directory, (first,), IN, (0,))
    return ShrinkExpand(
        shrink, LoRASlices(arena.directory, (first + 1,), 0, (OUT // PARTS,)), PARTS
    )


@pytest.mark.parametrize("name", NAMES)
def test_shrink_and_expand_with_an_exchange_make_the_whole_product(name: str) -> None:
    share = OUT // PARTS
    shapes = [
        ModuleShape(
            *(f"rank{part}", IN, OUT, 2 * part),
            shard=Shard(None, (range(part * share, (part + 1) * share),), PARTS, part),
        )
        for part in range(PARTS)
    ]
    arena = Arena(len(RANKS), shapes, 1 << 16, torch.float32, "cpu")
    arena.data.fill_(float("nan"))
    torch.manual_seed(1)
    pairs = [(torch.randn(rank, IN), torch.randn(OUT, rank)) for rank in RANKS]
    for slot, (a, b) in enumerate(pairs):
        for shape in shapes:
            parts = (shape.shard.select_a(a).clone(), shape.shard.select_b(b).clone())
            arena.write_slice(slot, shape.index, *parts)
    punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, kernels_of(name))
    ids = torch.tensor(SLOT_OF_ROW) + 1
    punica.update_metadata(LoRAMapping(ids, ids), [1, 2])
    x, base = torch.randn(len(ids), IN), torch.randn(len(ids), OUT)
    by_rank = [shrink_expand_of(arena, shape.index) for shape in shapes]
    shrunk: list[Tensor] = []
    for slices in by_rank:
        buffer = torch.zeros(1, len(ids), RANK_MAX // PARTS)
        punica.add_shrink(buffer, x, slices.shrink)
        shrunk.append(buffer)
    whole = torch.stack(shrunk, -1).flatten(-2)
    found = []
    for part, slices in enumerate(by_rank):
        y = base[:, part * share : (part + 1) * share].contiguous()

        def exchange(own: Tensor, part: int = part) -> Tensor:
            assert torch.equal(own, shrunk[part])
            return whole

        punica.add_lora_shrink_expand(y, x, slices, exchange)
        found.append(y)
    expected = base.clone()
    for row, slot in enumerate(SLOT_OF_ROW):
        if slot >= 0:
            expected[row] += x[row] @ pairs[slot][0].T @ pairs[slot][1].T
    assert relative_error(torch.cat(found, -1), expected) < 1e-5
    arena.close()
