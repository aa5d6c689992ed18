"""Properties of staging: a blob computes what the adapter does, and its size is known before."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.errors import HostOutOfMemory
from loradock.engine.layout import (
    ABSENT,
    ALIGNMENT_BYTES,
    ModuleShape,
    aligned_elements,
    blob_bytes,
    slice_elements,
)
from loradock.engine.residency.pinned import PinnedMemory
from loradock.engine.residency.staging import Blob, stage, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = [*DTYPES, torch.float64]
WIDTHS = st.integers(1, 70)


def unpacked(blob: Blob, shape: ModuleShape) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A and B, read from a blob by the documented layout alone."""
    start, rank = int(blob.offsets[shape.index]), int(blob.ranks[shape.index])
    if start == ABSENT:
        assert rank == 0
        return None
    alignment = ALIGNMENT_BYTES // blob.data.element_size()
    assert start % alignment == 0
    b_start = start + -(-rank * shape.in_features // alignment) * alignment
    a = blob.data[start : start + rank * shape.in_features]
    b = blob.data[b_start : b_start + shape.out_features * rank]
    return a.view(rank, shape.in_features), b.view(shape.out_features, rank)


def delta(lora: LoRALayerWeights, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what peft adds to the base weight, with each matrix converted by `read`."""
    return lora.lora_alpha / lora.rank * read(lora.lora_b) @ read(lora.lora_a)


@st.composite
def adapters(draw: st.DrawFn) -> tuple[LoRAModel, list[ModuleShape]]:
    widths = draw(st.lists(st.tuples(WIDTHS, WIDTHS), min_size=1, max_size=6))
    order = draw(st.permutations(range(len(widths))))
    shapes = [ModuleShape(f"m{i}", *widths[i], index) for i, index in enumerate(order)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    touched = draw(st.sets(st.sampled_from(range(len(widths))), min_size=1))
    loras = {}
    for i in touched:
        rank, dtype = draw(st.integers(1, 17)), draw(st.sampled_from(STORED))
        a = torch.randn(rank, widths[i][0], generator=generator).to(dtype)
        b = torch.randn(widths[i][1], rank, generator=generator).to(dtype)
        alpha = draw(st.sampled_from([1.0, -3.0, 16.0, 0.1 * rank, float(rank)]))
        loras[f"m{i}"] = LoRALayerWeights(f"m{i}", rank, alpha, a, b)
    return LoRAModel(1, max(lora.rank for lora in loras.values()), loras), shapes


@settings(max_examples=150)
@given(adapters(), st.sampled_from(DTYPES))
def test_a_blob_computes_what_the_adapter_computes(
    adapter: tuple[LoRAModel, list[ModuleShape]], dtype: torch.dtype
) -> None:
    model, shapes = adapter
    before = {name: (lora.lora_b.clone(), lora.scaling) for name, lora in model.loras.items()}
    blob = stage(model, shapes, dtype)
    assert blob.data.dtype == dtype
    assert blob.data.dim() == 1
    assert blob.size_bytes % ALIGNMENT_BYTES == 0
    for shape in shapes:
        found, lora = unpacked(blob, shape), model.get_lora(shape.name)
        assert (found is None) == (lora is None)
        if found is None or lora is None:
            continue
        a, b = found
        assert torch.equal(a, lora.lora_a.to(dtype))
        assert torch.equal(b, (lora.lora_b.float() * lora.scaling).to(dtype))
        error = (b.double() @ a.double() - delta(lora, torch.Tensor.double)).abs()
        # A is rounded once, B at most three times, each by at most half an epsilon.
        allowed = 2.1 * torch.finfo(dtype).eps * delta(lora, lambda m: m.double().abs()).abs()
        assert (error <= allowed + 1e-6).all()
    for name, (b, scaling) in before.items():
        assert torch.equal(model.loras[name].lora_b, b), "staging changed the adapter"
        assert model.loras[name].scaling == scaling


@settings(max_examples=150)
@given(adapters(), st.sampled_from(DTYPES))
def test_the_size_is_known_from_shapes_and_every_byte_is_accounted_for(
    adapter: tuple[LoRAModel, list[ModuleShape]], dtype: torch.dtype
) -> None:
    model, shapes = adapter
    with patch("loradock.engine.memory.torch.empty", side_effect=_filled_with_nan):
        blob = stage(model, shapes, dtype)
    ranks = {name: lora.rank for name, lora in model.loras.items()}
    assert blob.size_bytes == blob_bytes(ranks, shapes, dtype)
    assert torch.isfinite(blob.data).all(), "something was left unwritten"
    starts = blob.offsets[blob.offsets != ABSENT].tolist()
    assert starts == sorted(starts), "the slices are not in the directory's order"
    covered = torch.zeros(blob.data.numel(), dtype=torch.bool)
    for shape in shapes:
        if shape.name in ranks:
            start = int(blob.offsets[shape.index])
            end = start + slice_elements(ranks[shape.name], shape, dtype)
            assert not covered[start:end].any(), "two slices overlap"
            covered[start:end] = True
    assert covered.all()


def _filled_with_nan(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize(
    ("rank", "width", "dtype", "expected"),
    [
        (1, 1, torch.float32, 32),
        (1, 32, torch.float32, 32),
        (1, 33, torch.float32, 64),
        (3, 43, torch.bfloat16, 192),
        (4, 16, torch.bfloat16, 64),
        (512, 1 << 22, torch.bfloat16, 1 << 31),
    ],
)
def test_b_starts_on_the_next_multiple_of_128_bytes(
    rank: int, width: int, dtype: torch.dtype, expected: int
) -> None:
    assert aligned_elements(rank * width, dtype) == expected


def test_a_module_without_a_column_is_an_error() -> None:
    lora = LoRALayerWeights("known", 1, 1.0, torch.ones(1, 2), torch.ones(2, 1))
    shapes = [ModuleShape("known", 2, 2, 0)]
    model = LoRAModel(1, 1, {"known": lora, "unknown": lora})
    with pytest.raises(KeyError, match="unknown"):
        stage(model, shapes, torch.float32)


def test_a_blob_that_is_pageable_stays_as_it_is() -> None:
    lora = LoRALayerWeights("m", 1, 1.0, torch.ones(1, 2), torch.ones(2, 1))
    blob = stage(LoRAModel(1, 1, {"m": lora}), [ModuleShape("m", 2, 2, 0)], torch.float32)
    assert not blob.is_pinned
    assert blob.to_pageable() is blob


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
@pytest.mark.gpu
def test_a_blob_moves_between_pageable_and_page_locked_memory() -> None:
    lora = LoRALayerWeights("m", 1, 1.0, torch.ones(1, 2), torch.ones(2, 1))
    memory = PinnedMemory(1 << 20)
    shapes = [ModuleShape("m", 2, 2, 0)]
    blob = stage(LoRAModel(1, 1, {"m": lora}), shapes, torch.float32, memory)
    assert blob.is_pinned
    assert blob.to_pinned(memory) is blob
    pageable = blob.to_pageable()
    assert not pageable.is_pinned
    assert torch.equal(pageable.data, blob.data)
    assert pageable.to_pinned(memory).is_pinned


def test_a_host_without_enough_memory_is_an_error() -> None:
    lora = LoRALayerWeights("m", 1, 1.0, torch.ones(1, 2), torch.ones(2, 1))
    with (
        patch("loradock.engine.memory.torch.empty", side_effect=RuntimeError("can't allocate")),
        pytest.raises(HostOutOfMemory, match="256 bytes of pageable host memory"),
    ):
        stage(LoRAModel(1, 1, {"m": lora}), [ModuleShape("m", 2, 2, 0)], torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [0.25, 2.0, 3.0, 1 / 3, 1.0])
def test_b_is_the_product_in_float32_rounded_once(dtype: torch.dtype, scaling: float) -> None:
    exponents = torch.linspace(-30, 10, 640).exp2().reshape(64, 10)
    lora_b = (torch.randn(64, 10, generator=torch.Generator().manual_seed(3)) * exponents).to(dtype)
    shape = ModuleShape("m", 8, 64, 0)
    lora = LoRALayerWeights("m", 10, 10, torch.zeros(10, 8, dtype=dtype), lora_b, scaling)
    blob = stage(LoRAModel(1, 10, {"m": lora}), [shape], dtype)
    [written] = unpack(blob, [shape], 1).loras.values()
    assert torch.equal(written.lora_b, (lora_b.float() * scaling).to(dtype))
