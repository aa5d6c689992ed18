"""The ways of a model's own product: equal results, and a choice by measured times."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from loradock.engine.kernels.cpu import base_linear
from loradock.engine.kernels.cpu.base_linear import (
    ROWS,
    WAYS,
    fastest_linear,
    fastest_ways,
    rounded_rows,
)
from loradock.engine.kernels.threads import threads_for
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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "columns of a wider one": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every second row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "one row repeated": lambda x: x[..., :1, :].expand(x.shape),
    "of a view": lambda x: torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape),
}
"""Layouts of a matrix in memory."""


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("of_weight", LAYOUTS)
@pytest.mark.parametrize("name", WAYS)
def test_every_way_reads_every_layout(name: str, of_weight: str, inference: bool) -> None:
    torch.manual_seed(4)
    with torch.inference_mode(inference), threads_for(1):
        for shape in ((33,), (1, 33), (4, 2, 33), (70, 33), (160, 33)):
            for out_features in (1, 40):
                weight = LAYOUTS[of_weight](torch.randn(out_features, 33))
                bias = torch.randn(2 * out_features)[::2]
                for layout in LAYOUTS.values():
                    x = torch.randn(shape) if len(shape) < 2 else layout(torch.randn(shape))
                    operands = x, weight, bias
                    before = [one.clone() for one in operands]
                    found = WAYS[name](*operands)
                    torch.testing.assert_close(found, linear(*before))
                    found.fill_(torch.nan)
                    assert all(map(torch.equal, operands, before))


@pytest.mark.parametrize("name", WAYS)
def test_no_way_keeps_a_copy_of_a_weight(name: str) -> None:
    x, weight = torch.randn(9, 33), Parameter(torch.randn(17, 33), requires_grad=False)
    results = []
    for value in range(3):
        weight.data = torch.full((17, 33), float(value))
        results.append(WAYS[name](x, weight, None))
        weight[:, :] = -1.0
        results.append(WAYS[name](x, weight, None))
    for expected, result in zip((0.0, -1.0, 1.0, -1.0, 2.0, -1.0), results, strict=True):
        torch.testing.assert_close(result, linear(x, torch.full((17, 33), expected)))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_serves_several_threads(name: str) -> None:
    random = Random(8)
    sizes = [(random.choice((1, 5, 61, 200)), random.randint(1, 90)) for _ in range(60)]

    def compare(size: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(hash(size))
        x = torch.randn(size, generator=generator)
        weight = torch.randn(40, size[1], generator=generator)
        torch.testing.assert_close(WAYS[name](x, weight, None), linear(x, weight))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, sizes))


def test_few_numbers_of_rows_are_computed_by_onednn() -> None:
    """It keeps code for each of them."""
    numbers = range(1, 8193)
    rounded = [rounded_rows(rows) for rows in numbers]
    assert rounded[:16] == list(numbers[:16])
    assert all(rows <= found <= 1.125 * rows for rows, found in zip(numbers, rounded, strict=True))
    assert rounded == sorted(rounded)
    assert len(set(rounded)) == 16 + 8 * 9


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("oneDNN")])
def test_onednn_computes_rounded_numbers_of_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Operations:
        """Records the shapes of products in place of oneDNN."""

        def _linear_pointwise(self, x: Tensor, weight: Tensor, bias: object, *_: object) -> Tensor:
            seen.append((len(x.flatten(0, -2)), len(weight)))
            return linear(x, weight, bias)

    monkeypatch.setattr(torch.ops, "mkldnn", Operations())
    weight = torch.randn(7, 5)
    for shape in ((16, 5), (17, 5), (3, 11, 5), (130, 5)):
        x = torch.randn(shape)
        torch.testing.assert_close(WAYS[name](x, weight, None), linear(x, weight))
    expected = [(rows, 7) for rows in (16, 18, 36, 144)]
    assert seen == ([(b, a) for a, b in expected] if "transposed" in name else expected)


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


class OtherKind(Tensor):
    """A tensor of another kind, as quantised weights are."""


def test_what_is_no_plain_float32_product_is_left_to_the_layer() -> None:
    product = fastest_linear([LAST] * len(ROWS))
    assert product is not None
    x, weight, bias = torch.randn(3, 33), torch.randn(17, 33), torch.randn(17)
    torch.testing.assert_close(product(x, weight, bias), linear(x, weight, bias))
    torch.testing.assert_close(product(x, Parameter(weight), None), linear(x, weight))
    assert product(x, weight.as_subclass(OtherKind), None) is None
    assert product(x[:0], weight, bias) is None
    for dtype in (torch.bfloat16, torch.float64):
        assert product(x.to(dtype), weight.to(dtype), bias.to(dtype)) is None
        assert product(x, weight.to(dtype), None) is None
