"""The batch's metadata and the two products, against a float64 sum written out row by row."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.errors import NotResident
from engine.kernels import IMPLEMENTATIONS, Kernels, choose_kernels
from engine.kernels.operands import Directory, LoRASlices
from engine.punica import LoRAMapping, PunicaWrapper
from engine.staging import a_elements

ERRORS_MAX = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
RANKS = (1, 3, 8, 16)
RANK_MAX = 16

Weights = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""(slot, slice) -> A and B."""


def lay_out(
    weights: Weights, slots: int, in_features: int, widths: list[int], dtype: torch.dtype
) -> LoRASlices:
    """A directory and an arena that holds NaN wherever no weight lies."""
    unit = 128 // dtype.itemsize
    sizes = {
        key: a_elements(a.shape[0], in_features, dtype) + -(-b.numel() // unit) * unit
        for key, (a, b) in weights.items()
    }
    data = torch.full((unit + sum(sizes.values()),), torch.nan, dtype=dtype)
    offsets = torch.full((slots, len(widths) + 1), -1, dtype=torch.int64)
    ranks = torch.zeros((slots, len(widths) + 1), dtype=torch.int32)
    start = unit
    for (slot, place), (a, b) in weights.items():
        behind = start + a_elements(a.shape[0], in_features, dtype)
        data[start : start + a.numel()] = a.flatten()
        data[behind : behind + b.numel()] = b.flatten()
        # Column 0 belongs to another layer, so that a kernel that ignores `columns` is seen.
        offsets[slot, place + 1], ranks[slot, place + 1] = start, a.shape[0]
        start += sizes[slot, place]
    columns = tuple(range(1, len(widths) + 1))
    directory = Directory(data, offsets, ranks, offsets, ranks)
    return LoRASlices(directory, columns, in_features, tuple(widths))


def expected_output(y: Tensor, x: Tensor, weights: Weights, slots: list[int], widths: list[int]):
    result = y.double().clone()
    for row, slot in enumerate(slots):
        first = 0
        for place, width in enumerate(widths):
            if (slot, place) in weights:
                a, b = (tensor.double() for tensor in weights[slot, place])
                result[row, first : first + width] += b @ (a @ x[row].double())
            first += width
    return result


def wrapper(kernels: Kernels | None = None) -> PunicaWrapper:
    return PunicaWrapper(torch.device("cpu"), RANK_MAX, kernels or choose_kernels("cpu"))


def random_batch(random: Random, dtype: torch.dtype):
    slots, widths = (
        random.randint(1, 5),
        [random.choice((1, 7, 32)) for _ in range(random.randint(1, 3))],
    )
    in_features, tokens = random.choice((1, 5, 33)), random.randint(1, 20)
    torch.manual_seed(random.randrange(2**31))
    weights = {
        (slot, place): (
            torch.randn(rank, in_features).to(dtype),
            torch.randn(width, rank).to(dtype),
        )
        for slot in range(slots)
        for place, width in enumerate(widths)
        if random.random() < 0.8 and (rank := random.choice(RANKS))
    }
    # The last slot and the base are always there: -1 must not index the last.
    rows = [slots - 1, -1] + [random.randint(-1, slots - 1) for _ in range(tokens)]
    random.shuffle(rows)
    x = torch.randn(len(rows), in_features).to(dtype)
    y = torch.randn(len(rows), sum(widths)).to(dtype)
    return weights, slots, widths, rows, x, y


@pytest.mark.parametrize("dtype", ERRORS_MAX)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_delta_is_the_sum_written_out(name: str, dtype: torch.dtype, seed: int) -> None:
    weights, slots, widths, rows, x, y = random_batch(Random(seed), dtype)
    punica = wrapper(IMPLEMENTATIONS[name])
    ids = [100 + slot if slot >= 0 else 0 for slot in rows]
    punica.update_metadata(LoRAMapping(ids, ids), [100 + slot for slot in range(slots)])
    found = y.clone()
    punica.add_lora_linear(found, x, lay_out(weights, slots, x.shape[1], widths, dtype))
    expected = expected_output(y, x, weights, rows, widths)
    assert float((found.double() - expected).norm() / expected.norm()) < ERRORS_MAX[dtype]
    base_rows = [row for row, slot in enumerate(rows) if slot < 0]
    assert torch.equal(found[base_rows], y[base_rows])


def test_the_same_batch_gives_the_same_bits() -> None:
    weights, slots, widths, rows, x, y = random_batch(Random(5), torch.float32)
    punica = wrapper()
    ids = [slot + 1 for slot in rows]
    punica.update_metadata(LoRAMapping(ids, ids), list(range(1, slots + 1)))
    operands = lay_out(weights, slots, x.shape[1], widths, torch.float32)
    results = []
    for _ in range(3):
        results.append(y.clone())
        punica.add_lora_linear(results[-1], x, operands)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_table_of_kernels_knows_its_names_and_devices() -> None:
    assert choose_kernels("cpu", "reference") is IMPLEMENTATIONS["reference"]
    for arguments in [("cpu", "magic"), ("abacus",)]:
        with pytest.raises(ValueError, match="reference"):
            choose_kernels(*arguments)


def two_ranks() -> tuple[Weights, LoRASlices]:
    torch.manual_seed(3)
    weights = {
        (0, 0): (torch.randn(2, 5), torch.randn(4, 2)),
        (1, 0): (torch.randn(8, 5), torch.randn(4, 8)),
    }
    return weights, lay_out(weights, 2, 5, [4], torch.float32)


def test_shrink_writes_the_own_rank_of_adapter_rows_and_nothing_else() -> None:
    weights, operands = two_ranks()
    punica = wrapper()
    punica.update_metadata(LoRAMapping([7, 0, 8], [7, 0, 8]), [7, 8])
    x, buffer = torch.randn(3, 5), torch.full((1, 3, 16), -5.0)
    punica.add_shrink(buffer, x, operands, scale=2.0)
    assert torch.allclose(buffer[0, 0, :2], 2 * weights[0, 0][0] @ x[0])
    assert torch.allclose(buffer[0, 2, :8], 2 * weights[1, 0][0] @ x[2])
    assert (buffer[0, 0, 2:] == -5).all()
    assert (buffer[0, 1] == -5).all()
    assert (buffer[0, 2, 8:] == -5).all()


@pytest.mark.parametrize("add_inputs", [True, False])
def test_expand_writes_at_its_offset_and_adds_or_replaces(add_inputs: bool) -> None:
    weights, operands = two_ranks()
    punica = wrapper()
    punica.update_metadata(LoRAMapping([0, 8], [0, 8]), [7, 8])
    shrunk, y = torch.randn(1, 2, 16), torch.ones(2, 9)
    punica.add_expand(y, shrunk, operands, offset=3, add_inputs=add_inputs)
    delta = weights[1, 0][1] @ shrunk[0, 1, :8]
    assert torch.allclose(y[1, 3:7], delta + (1 if add_inputs else 0), atol=1e-6)
    assert (y[0] == 1).all()
    assert (y[1, :3] == 1).all()
    assert (y[1, 7:] == 1).all()


def forbidden(*_: object) -> None:
    raise AssertionError("a kernel was called")


@pytest.mark.parametrize("mapping", [None, LoRAMapping([0, 0], [0, 0])])
def test_a_batch_without_adapters_calls_no_kernel(mapping: LoRAMapping | None) -> None:
    punica = wrapper(Kernels(forbidden, forbidden))
    if mapping is not None:
        punica.update_metadata(mapping, [7, 8])
    y = torch.ones(2, 4)
    punica.add_lora_linear(y, torch.ones(2, 5), two_ranks()[1])
    assert (y == 1).all()


def test_a_batch_of_other_rows_than_the_mapping_is_refused() -> None:
    punica = wrapper()
    punica.update_metadata(LoRAMapping([7, 7], [7]), [7, 8])
    with pytest.raises(ValueError, match="3 tokens meets a mapping of 2"):
        punica.add_lora_linear(torch.ones(3, 4), torch.ones(3, 5), two_ranks()[1])


@given(
    layout=st.lists(st.integers(1, 9) | st.none(), min_size=1, max_size=8, unique=True),
    draws=st.lists(st.integers(0, 100), max_size=30),
)
def test_metadata_follows_the_layout(layout: list[int | None], draws: list[int]) -> None:
    known = [0, *(adapter for adapter in layout if adapter is not None)]
    ids = [known[draw % len(known)] for draw in draws]
    slots = [layout.index(adapter) if adapter else -1 for adapter in ids]
    punica = wrapper()
    assert punica.update_metadata(LoRAMapping(ids, ids[:2]), layout)
    assert punica.token_slots is not None
    assert punica.token_slots.tolist() == slots
    assert punica.prompt_slots is not None
    assert punica.prompt_slots.tolist() == slots[:2]
    groups = punica.groups
    assert groups is not None
    assert groups.tokens == len(ids)
    own = sorted((slot, row) for row, slot in enumerate(slots) if slot >= 0)
    assert groups.rows.tolist() == [row for _, row in own]
    active = sorted({slot for slot, _ in own})
    assert groups.slots.tolist() == active
    counts = [slots.count(slot) for slot in active]
    assert groups.counts.tolist() == counts
    starts = [sum(counts[:place]) for place in range(len(counts))]
    assert groups.starts.tolist() == starts
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    assert list(groups.spans) == list(zip(active, starts, ends, strict=True))


def test_only_a_change_of_mapping_or_of_layout_is_worked_on() -> None:
    punica = wrapper()
    assert punica.update_metadata(LoRAMapping([1, 0], [1, 0]), [1, 2])
    assert not punica.update_metadata(LoRAMapping((1, 0), torch.tensor([1, 0])), (1, 2))
    assert punica.update_metadata(LoRAMapping([1, 0], [1, 0]), [2, 1])
    assert punica.token_slots is not None
    assert punica.token_slots.tolist() == [1, -1]
    assert punica.update_metadata(LoRAMapping([2, 0], [1, 0]), [2, 1])
    assert punica.update_metadata(LoRAMapping([2, 0], [1]), [2, 1])
    assert punica.update_metadata(LoRAMapping([2, 0], [1], is_prefill=True), [2, 1])


def test_an_adapter_without_a_slot_is_an_error_and_changes_nothing() -> None:
    punica = wrapper()
    punica.update_metadata(LoRAMapping([1], [1]), [1, None])
    before = punica.groups
    for mapping in (LoRAMapping([1, 5], [1]), LoRAMapping([1], [5])):
        with pytest.raises(NotResident, match="5"):
            punica.update_metadata(mapping, [1, None])
    assert punica.groups is before
    assert not punica.update_metadata(LoRAMapping([1], [1]), [1, None])
