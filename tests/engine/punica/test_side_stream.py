"""A delta computed concurrently with the base output: the sum does not depend on the order."""

from random import Random

import pytest
import torch
from torch import Tensor

from loradock.engine.kernels import choose_kernels
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.punica.side_stream import SideStream
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    Shape,
    error_of,
    expected_output,
    make_case,
    mixed_rows,
)

CPU = torch.device("cpu")


class Sequential:
    """Runs the product first, so that a sum that does not wait for it would be wrong."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, base, product) -> tuple[Tensor, Tensor]:
        self.runs += 1
        delta = product()
        return base(), delta


def wrapper(concurrent: Sequential) -> PunicaWrapper:
    return PunicaWrapper(CPU, 16, choose_kernels("cpu", "reference"), concurrent=concurrent)


def mapping(rows: list[int]) -> LoRAMapping:
    return LoRAMapping([slot + 1 for slot in rows], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_concurrent_delta_equals_a_sequential_one(dtype: torch.dtype) -> None:
    rows = mixed_rows(Random(4), 30, 3)
    case = make_case(Shape(20, (12, 7), 3, (1, 5, 16)), rows, dtype, seed=4)
    concurrent = Sequential()
    punica = wrapper(concurrent)
    punica.update_metadata(mapping(rows), [1, 2, 3])
    found = punica.with_lora_linear(lambda: case.y.clone().view(5, 6, -1), case.x, case.slices)
    assert concurrent.runs == 1
    found = found.view(30, -1)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[dtype]
    assert torch.equal(found[case.base_rows], case.y[case.base_rows])


def test_rows_and_base_outputs_may_be_transposed_views() -> None:
    case = make_case(Shape(20, (12,), 2, (5,)), [1, -1, 0], torch.float32, seed=3)
    punica = wrapper(Sequential())
    punica.update_metadata(mapping(case.rows), [1, 2])
    x, y = (tensor.t().contiguous().t() for tensor in (case.x, case.y))
    found = punica.with_lora_linear(lambda: y, x, case.slices)
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[torch.float32]
    assert torch.equal(y, case.y)


def test_deltas_of_sampled_rows_are_concurrent_too() -> None:
    case = make_case(Shape(20, (12,), 2, (5,)), [1, -1, 0], torch.float32, seed=2)
    concurrent = Sequential()
    punica = wrapper(concurrent)
    punica.update_metadata(LoRAMapping([2, 2, 0, 0, 1], [2, 0, 1]), [1, 2])
    found = punica.with_lora_linear(case.y.clone, case.x, case.slices)
    assert concurrent.runs == 1
    assert error_of(found, expected_output(case)) <= ERRORS_MAX[torch.float32]


def test_a_batch_without_adapters_runs_nothing_concurrently() -> None:
    case = make_case(Shape(20, (12,), 2, (5,)), [-1, -1], torch.float32, seed=1)
    concurrent = Sequential()
    punica = wrapper(concurrent)
    punica.update_metadata(mapping(case.rows), [1, 2])
    assert punica.with_lora_linear(lambda: case.y, case.x, case.slices) is case.y
    assert concurrent.runs == 0


def test_a_side_stream_needs_a_cuda_device() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        SideStream(CPU)
