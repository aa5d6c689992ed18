"""The batch's metadata, and the kernel that each operation of the wrapper calls."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loradock.engine.errors import NotResident
from loradock.engine.kernels import IMPLEMENTATIONS, Kernels, choose_kernels
from loradock.engine.kernels.gpu.tile_configs import regime_of
from loradock.engine.kernels.operands import LoRASlices, RowOrder
from loradock.engine.layout import ModuleKind
from loradock.engine.punica import LoRAMapping, MappingType, PunicaWrapper
from tests.support.kernels.kernel_cases import (
    Shape,
    Weights,
    error_of,
    expected_output,
    lay_out,
    make_case,
)


def wrapper(kernels: Kernels | None = None) -> PunicaWrapper:
    return PunicaWrapper(torch.device("cpu"), 16, kernels or choose_kernels("cpu"))


def test_kernels_are_chosen_by_name_or_device() -> None:
    for name in IMPLEMENTATIONS:
        assert isinstance(choose_kernels("cpu", name), Kernels)
    for arguments in [("cpu", "magic"), ("abacus",)]:
        with pytest.raises(ValueError, match="reference"):
            choose_kernels(*arguments)


def two_ranks() -> tuple[Weights, LoRASlices]:
    torch.manual_seed(3)
    weights = {
        (0, 0): (torch.randn(2, 5), torch.randn(4, 2)),
        (1, 0): (torch.randn(8, 5), torch.randn(4, 8)),
    }
    return weights, lay_out(weights, Shape(5, (4,), 2, ()), torch.float32)


def forbidden(*_: object) -> None:
    raise AssertionError("a kernel was called")


@pytest.mark.parametrize("mapping", [None, LoRAMapping([0, 0], [0, 0])])
def test_a_batch_without_adapters_calls_no_kernel(mapping: LoRAMapping | None) -> None:
    punica = wrapper(Kernels(*[forbidden] * len(Kernels._fields)))
    if mapping is not None:
        punica.update_metadata(mapping, [7, 8])
    y = torch.ones(2, 4)
    punica.add_lora_linear(y, torch.ones(2, 5), two_ranks()[1])
    assert (y == 1).all()


def test_a_batch_of_other_rows_than_the_mapping_is_refused() -> None:
    punica, operands = wrapper(), two_ranks()[1]
    punica.update_metadata(LoRAMapping([7, 7], [7]), [7, 8])
    with pytest.raises(ValueError, match="3 rows, but the mapping has 2"):
        punica.add_lora_linear(torch.ones(3, 4), torch.ones(3, 5), operands)
    with pytest.raises(ValueError, match="3 rows, but the mapping has 2"):
        punica.add_lora_embedding(torch.ones(3, 4), torch.ones(3, dtype=torch.int64), operands, 1.0)


def test_a_head_uses_the_sampled_rows_or_every_token() -> None:
    punica = wrapper()
    assert punica.groups_of(3) is None
    punica.update_metadata(LoRAMapping([0, 7, 7], [0, 7]), [7])
    assert punica.groups_of(2) is punica.prompt_groups
    assert punica.groups_of(3) is punica.groups
    with pytest.raises(ValueError, match="4 rows"):
        punica.groups_of(4)
    punica.update_metadata(LoRAMapping([0, 0, 0], [0, 0]), [7])
    assert punica.groups_of(3) is None


def test_logits_use_the_sampled_rows_and_other_layers_the_tokens() -> None:
    rows, sampled = [0, 0, -1, 1, 1], [1, -1, 0]
    punica = wrapper()
    punica.update_metadata(
        LoRAMapping([slot + 1 for slot in rows], [slot + 1 for slot in sampled]), [1, 2]
    )
    for slots, add, kind, scale in [
        (rows, punica.add_lora_linear, ModuleKind.LINEAR, ()),
        (rows, punica.add_lora_embedding, ModuleKind.EMBEDDING, (0.5,)),
        (sampled, punica.add_lora_linear, ModuleKind.LINEAR, ()),
    ]:
        case = make_case(Shape(9, (6,), 2, (3, 4), 0.0, kind), slots, torch.float32, seed=1)
        found = case.y.clone()
        add(found, case.x, case.slices, *scale)
        assert error_of(found, expected_output(case, *scale)) < 1e-5


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
    counts = [slots.count(slot) for slot in active]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    assert list(groups.spans) == list(zip(active, starts, ends, strict=True))


@pytest.mark.parametrize("buffer", [torch.tensor([1, 0]), np.array([1, 0])], ids=type)
def test_a_buffer_that_is_refilled_after_each_step_counts_as_a_change(buffer: Any) -> None:
    punica = wrapper()
    assert punica.update_metadata(LoRAMapping(buffer, buffer), [1, 2])
    buffer[0] = 2
    assert punica.update_metadata(LoRAMapping(buffer, buffer), [1, 2])
    assert punica.token_slots is not None
    assert punica.token_slots.tolist() == [1, -1]


def test_mappings_are_equal_by_value() -> None:
    mapping = LoRAMapping([1, 0], [1])
    assert mapping == LoRAMapping(torch.tensor([1, 0]), np.array([1]))
    for other in (
        *(LoRAMapping([1, 2], [1]), LoRAMapping([1, 0], [0]), LoRAMapping([1, 0, 0], [1])),
        *(LoRAMapping([1, 0], [1], is_prefill=True), "mapping"),
        LoRAMapping([1, 0], [1], type=MappingType.TOWER),
    ):
        assert mapping != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(mapping)


def test_only_a_changed_mapping_or_layout_is_processed() -> None:
    punica = wrapper()
    assert punica.update_metadata(LoRAMapping([1, 0], [1, 0]), [1, 2])
    assert not punica.update_metadata(LoRAMapping((1, 0), torch.tensor([1, 0])), (1, 2))
    assert punica.update_metadata(LoRAMapping([1, 0], [1, 0]), [2, 1])
    assert punica.token_slots is not None
    assert punica.token_slots.tolist() == [1, -1]
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


def test_a_row_that_is_a_token_and_a_sampled_row_has_one_adapter() -> None:
    punica = wrapper()
    punica.update_metadata(LoRAMapping([1, 0], [1, 0]), [1, 2])
    before = punica.groups
    for index, prompt in (([1, 2], [2, 1]), ([1, 0], [1, 1]), ([0, 0], [0, 1])):
        with pytest.raises(ValueError, match="both have 2 rows and differ"):
            punica.update_metadata(LoRAMapping(index, prompt), [1, 2])
    assert punica.groups is before
    assert not punica.update_metadata(LoRAMapping([1, 0], [1, 0]), [1, 2])


def test_a_layer_may_have_any_number_of_rows_for_each_sampled_row() -> None:
    weights, operands = two_ranks()
    punica = wrapper()
    punica.update_metadata(LoRAMapping([7, 0, 8], [7, 0, 8]), [7, 8])
    x, y = torch.randn(3, 4, 5), torch.zeros(12, 4)
    punica.add_lora_linear(y, x, operands)
    for row, slot in ((0, 0), (2, 1)):
        a, b = weights[slot, 0]
        assert torch.allclose(y.view(3, 4, 4)[row], x[row] @ a.T @ b.T, atol=1e-5)
    assert (y.view(3, 4, 4)[1] == 0).all()


def test_a_row_that_runs_alone_has_its_adapter_in_every_layer() -> None:
    weights, operands = two_ranks()
    punica = wrapper()
    punica.update_metadata(LoRAMapping([7, 0, 8], [7, 0, 8]), [7, 8])
    x, y = torch.randn(5, 5), torch.zeros(5, 4)
    with punica.only_row(2):
        punica.add_lora_linear(y, x, operands)
    a, b = weights[1, 0]
    assert torch.allclose(y, x @ a.T @ b.T, atol=1e-5)
    with punica.only_row(1):
        assert punica.groups_of(5) is None
    with pytest.raises(ValueError, match="5 rows"):
        punica.add_lora_linear(y, x, operands)


def test_rows_in_an_order_of_the_model_itself_have_one_adapter_or_none() -> None:
    weights, operands = two_ranks()
    operands.row_order = RowOrder.UNKNOWN
    punica = wrapper()
    x, y = torch.randn(3, 5), torch.zeros(3, 4)
    punica.update_metadata(LoRAMapping([7, 7], [7, 7]), [7, 8])
    punica.add_lora_linear(y, x, operands)
    a, b = weights[0, 0]
    assert torch.allclose(y, x @ a.T @ b.T, atol=1e-5)
    punica.update_metadata(LoRAMapping([7, 0, 8], [7, 0, 8]), [7, 8])
    with pytest.raises(ValueError, match="a separate batch"):
        punica.add_lora_linear(y, x, operands)


def test_rows_in_the_second_dimension_have_their_own_adapters() -> None:
    weights, operands = two_ranks()
    operands.row_order = RowOrder.COLUMNS
    punica = wrapper()
    # The mapping has the input's number of tokens: that alone does not show the order.
    punica.update_metadata(LoRAMapping([7] * 3 + [0] * 3 + [8] * 3, [7, 0, 8]), [7, 8])
    x, y = torch.randn(3, 3, 5), torch.zeros(3, 3, 4)
    punica.add_lora_linear(y.view(9, 4), x, operands)
    for row, slot in ((0, 0), (2, 1)):
        a, b = weights[slot, 0]
        assert torch.allclose(y[:, row], x[:, row] @ a.T @ b.T, atol=1e-5)
    assert (y[:, 1] == 0).all()
    with pytest.raises(ValueError, match="a separate batch"):
        punica.add_lora_linear(y.view(9, 4), x.reshape(9, 5), operands)
    with punica.only_row(2):
        punica.add_lora_linear(y[:, :1].reshape(3, 4), x[:, :1], operands)


def test_logits_of_several_streams_have_the_adapters_of_their_rows() -> None:
    weights, operands = two_ranks()
    punica = wrapper()
    punica.update_metadata(LoRAMapping([7] * 3 + [8] * 3, [7, 8]), [7, 8])
    x, y = torch.randn(2, 2, 3, 5), torch.zeros(12, 4)
    punica.add_lora_linear(y, x, operands)
    for row in range(2):
        a, b = weights[row, 0]
        assert torch.allclose(y.view(2, 2, 3, 4)[row], x[row] @ a.T @ b.T, atol=1e-5)


@pytest.mark.parametrize("specialize_active", [False, True])
@pytest.mark.parametrize("max_loras", [1, 3, 8, 32, 47, 48, 50, 63, 64, 100])
def test_the_batches_to_compile_are_all_that_any_batch_needs(
    max_loras: int, specialize_active: bool
) -> None:
    kernels = choose_kernels("cpu")._replace(variant_of=regime_of)
    options = {"specialize_active": specialize_active}
    punica = PunicaWrapper(torch.device("cpu"), 16, kernels, **options)

    def variant_of(rows: int, adapters: int) -> str:
        return regime_of(punica.grouper.bounds_of(rows, adapters, max_loras))

    found = [variant_of(*batch) for batch in punica.batches_to_compile(8192, max_loras)]
    assert len(set(found)) == len(found)
    for rows in (1, 2, 3, 4, 5, 16, 31, 32, 33, 48, 63, 64, 65, 128, 500, 1536, 1537, 2048, 8192):
        needed = {variant_of(rows, adapters) for adapters in range(1, min(rows, max_loras) + 1)}
        assert needed <= set(found), rows
