"""The ways of a model's own product: equal results, and a choice by measured times."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.kernels.cpu import base_linear
from engine.kernels.cpu.base_linear import ROWS, WAYS, fastest_linear, fastest_ways
from tests.support.kernels.way_times import LAST, way_times

SHAPES = ((1, 33), (3, 33), (2, 5, 33), (1, 61, 33), (130, 33))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_has_the_result_of_a_linear_layer(name: str, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(17, 33)
    columns = torch.randn(33, 3).T
    for bias in (None, torch.randn(17)):
        for rows in (x, columns):
            found = WAYS[name](rows, weight, bias)
            torch.testing.assert_close(found, linear(rows, weight, bias))
            assert found.is_contiguous()


def test_a_way_is_used_where_it_is_clearly_faster() -> None:
    times = way_times(100.0, {1: 10.0, 16: 99.0, 61: 90.0})
    assert fastest_ways(times) == (LAST, "PyTorch", "PyTorch", LAST, "PyTorch")
    assert fastest_linear(fastest_ways(way_times(100.0))) is None


def test_the_way_of_a_product_follows_from_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def noting(name: str) -> Any:
        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            used.append(name)
            return linear(x, weight, bias)

        return product

    names = tuple(f"way {rows}" for rows in ROWS)
    monkeypatch.setattr(base_linear, "WAYS", {name: noting(name) for name in names})
    product = fastest_linear(names)
    assert product is not None
    weight = torch.randn(7, 5)
    for shape in (
        (1, 5),
        (2, 5),
        (2, 2, 5),
        (5, 5),
        (1, 16, 5),
        (17, 5),
        (61, 5),
        (62, 5),
        (999, 5),
    ):
        product(torch.randn(shape), weight, None)
    assert used == [f"way {rows}" for rows in (1, 4, 4, 16, 16, 61, 61, 125, 125)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_no_rows_are_pytorchs_own(dtype: torch.dtype) -> None:
    product = fastest_linear([LAST] * len(ROWS))
    assert product is not None
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((3, 33), (17, 33), (17,)))
    assert torch.equal(product(x, weight, bias), linear(x, weight, bias))
    assert product(torch.empty(0, 33), torch.randn(17, 33), None).shape == (0, 17)
