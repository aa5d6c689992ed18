"""A base layer's own float32 product, in the way that is the fastest for its number of rows.

A library packs an operand of a product first. Where that is the weight, packing it takes longer
than a product of few rows; in the transposed product it is x. And PyTorch's BLAS has no kernels of
its own for some processors, for which oneDNN has.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from loradock.engine.kernels.interface import BaseLinear

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x, weight, bias): `x @ weight.T + bias`, [..., out]; x: [..., in]. weight: [out, in]."""

ROWS: Final = (1, 4, 16, 61, 125)
"""The numbers of rows for which the ways are measured, and up to which each one is used.

The large ones are uneven, as those of a step with a part of a prompt are.
"""

FASTER_MIN: Final = 1.05
"""How many times as fast another way than PyTorch's own must be to be used."""


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The operation reads a bias as if it were contiguous.
    dense = None if bias is None else bias.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, dense, "none", [], "")
    return product


def rounded_rows(rows: int) -> int:
    """Return the number of rows, from 16 on rounded up to four binary digits."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def _rounded(product: Product) -> Product:
    """Return the product over `rounded_rows`, of which the last ones are zeros.

    oneDNN makes code for each shape that it meets, in about a millisecond, and keeps half a MiB for
    each of the last thousand. Steps with prompts have any number of rows.
    """

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.numel() // x.shape[-1]
        size = rounded_rows(rows)
        if size == rows:
            return product(x, weight, bias)
        padded = x.new_zeros(size, x.shape[-1])
        padded[:rows] = x.reshape(rows, -1)
        return product(padded, weight, bias)[:rows].view(*x.shape[:-1], -1)

    return compute


def _transposed(product: Product) -> Product:
    """Return the product that computes the transposed result, and copies it into its layout."""

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = product(weight, rows, None).T.contiguous().view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    return compute


def _has_onednn() -> bool:
    is_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


_OWN: Final = "PyTorch"
WAYS: Final[dict[str, Product]] = {
    _OWN: linear,
    "PyTorch, transposed": _transposed(linear),
}
if _has_onednn():
    WAYS["oneDNN"] = _rounded(_onednn)
    WAYS["oneDNN, transposed"] = _rounded(_transposed(_onednn))
"""The ways of a float32 product, by their names in reports. x: [..., in], at least one row."""

_PLAIN_KINDS: Final = (Tensor, Parameter)

WayTimes = tuple[tuple[float, ...], ...]
"""Microseconds for each of `ROWS`, by each of `WAYS`."""


def fastest_ways(times: WayTimes) -> tuple[str, ...]:
    """Return the name of the way to use for each of `ROWS`."""
    found = []
    for by_way in times:
        named = dict(zip(WAYS, by_way, strict=True))
        best = min(named, key=named.__getitem__)
        found.append(best if named[_OWN] >= FASTER_MIN * named[best] else _OWN)
    return tuple(found)


def fastest_linear(ways: Sequence[str]) -> BaseLinear | None:
    """Return the product that uses these ways, one for each of `ROWS`; None for PyTorch's own."""
    if set(ways) == {_OWN}:
        return None
    products = [WAYS[name] for name in ways]
    last = len(ROWS) - 1

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return `x @ weight.T + bias`, [..., out]; None for what was not measured.

        That is other dtypes than float32, no rows, and weights of other kinds than PyTorch's, which
        may be quantised. x: [..., in]. weight: [out, in], of any strides.
        """
        is_plain = x.dtype == weight.dtype == torch.float32 and type(weight) in _PLAIN_KINDS
        if not (is_plain and x.numel()):
            return None
        rows = x.numel() // x.shape[-1]
        return products[min(bisect_left(ROWS, rows), last)](x, weight, bias)

    return compute
