"""Products with packed weights: equal results for every number of rows, layout and thread."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from loradock.engine.kernels.packed_linear import (
    PACKED_ROWS_MIN,
    PackedWeight,
    can_pack,
    has_fast_products,
    onednn_linear,
    pack_weight,
    rounded_rows,
)
from loradock.engine.kernels.threads import threads_for

DTYPES = [
    dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.ones(2, 2).to(dtype))
]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "columns of a wider one": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every second row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "one row repeated": lambda x: x[..., :1, :].expand(x.shape),
    "of a view": lambda x: torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape),
}
"""Layouts of a matrix in memory."""


FORMS: dict[str, Callable[[Tensor], Tensor]] = {"packed": pack_weight, "as it is": lambda w: w}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_that_of_a_linear_layer_in_every_layout(
    dtype: torch.dtype, form: str, inference: bool
) -> None:
    torch.manual_seed(4)
    with torch.inference_mode(inference), threads_for(1):
        for shape in ((33,), (1, 33), (2, 33), (3, 33), (4, 2, 33), (70, 33), (160, 33)):
            for out_features, of_weight in (
                (1, "contiguous"),
                (40, "contiguous"),
                (40, "transposed"),
            ):
                weight = LAYOUTS[of_weight](torch.randn(out_features, 33).to(dtype))
                bias = torch.randn(2 * out_features).to(dtype)[::2]
                used = FORMS[form](weight)
                for layout in LAYOUTS.values():
                    x = torch.randn(shape).to(dtype)
                    x = x if len(shape) < 2 else layout(x)
                    before = [one.clone() for one in (x, weight, bias)]
                    for own_bias in (bias, None):
                        found = onednn_linear(x, used, own_bias)
                        bounds = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
                        expected = linear(x, weight, own_bias)
                        torch.testing.assert_close(found, expected, **bounds)
                        assert found.is_contiguous()
                        found.fill_(torch.nan)
                    assert all(map(torch.equal, (x, weight, bias), before))


@pytest.mark.parametrize("form", FORMS)
def test_several_threads_share_a_weight(form: str) -> None:
    random, weight = Random(8), torch.randn(40, 90)
    used = FORMS[form](weight)

    def compare(rows: int) -> None:
        x = torch.randn(rows, 90, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(onednn_linear(x, used, None), linear(x, weight))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, [random.choice((1, 5, 61, 200)) for _ in range(60)]))


def test_few_numbers_of_rows_are_computed() -> None:
    """oneDNN keeps code for each of them."""
    numbers = range(1, 8193)
    rounded = [rounded_rows(rows) for rows in numbers]
    assert rounded[:16] == list(numbers[:16])
    assert all(rows <= found <= 1.125 * rows for rows, found in zip(numbers, rounded, strict=True))
    assert rounded == sorted(rounded)
    assert len(set(rounded)) == 16 + 8 * 9


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_weight_is_read_as_the_weight_itself(dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        weight = torch.randn(40, 33).to(dtype)
        layer = nn.Linear(33, 40, dtype=dtype)
        layer.weight = nn.Parameter(pack_weight(weight), requires_grad=False)
        packed, x = layer.weight, torch.randn(3, 33).to(dtype)
        assert isinstance(packed, PackedWeight)
        assert isinstance(packed.data, PackedWeight)
        assert (packed.shape, packed.dtype, packed.device) == (weight.shape, dtype, weight.device)
        assert packed.nbytes == weight.nbytes
        assert torch.equal(packed, weight)
        assert torch.equal(packed[3:5].T, weight[3:5].T)
        assert torch.equal(packed.double(), weight.double())
        assert torch.equal(layer.state_dict()["weight"], weight)
        assert torch.equal(copy.deepcopy(layer).weight, weight)
        assert torch.equal(layer(x), linear(x, weight, layer.bias))
        with _refused():
            packed.mul_(2.0)
        with _refused():
            packed[0] = 0.0
        with _refused():
            packed.data.copy_(weight)
        assert torch.equal(packed, weight)


def _refused() -> "pytest.RaisesExc[RuntimeError]":
    return pytest.raises(RuntimeError, match="packed at load is written")


class OtherKind(Tensor):
    """A tensor of another kind, as quantised weights are."""


def test_only_plain_weights_of_supported_dtypes_are_packed() -> None:
    weight = torch.randn(8, 8)
    assert can_pack(weight)
    for other in (
        *(weight.double(), weight.half(), weight.char(), weight[None], weight[:0]),
        *(weight.to("meta"), weight.as_subclass(OtherKind), pack_weight(weight)),
    ):
        assert not can_pack(other)


def test_a_product_of_few_rows_is_padded_for_a_packed_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    product = torch.ops.mkldnn._linear_pointwise

    class Recorded:
        """Records the rows of products."""

        @staticmethod
        def default(x: Tensor, *others: object) -> Tensor:
            seen.append(x.numel() // x.shape[-1])
            return product(x, *others)

    weight = torch.randn(7, 5)
    packed = pack_weight(weight)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Recorded)
    for used in (packed, weight):
        for shape in ((5,), (2, 5), (4, 5), (3, 11, 5)):
            x = torch.randn(shape)
            torch.testing.assert_close(onednn_linear(x, used, None), linear(x, weight))
    assert seen == [PACKED_ROWS_MIN, PACKED_ROWS_MIN, 4, 36, 1, 2, 4, 36]


def test_float32_needs_no_special_instructions() -> None:
    assert has_fast_products(torch.float32)
