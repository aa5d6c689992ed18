"""A base layer's own float32 product by oneDNN, in place of the BLAS that PyTorch calls for it.

On processors for which that BLAS has no kernels of their own, oneDNN takes about half of the time.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`: [..., out]; other dtypes than float32 as PyTorch does.

    x: [..., in]. weight: [out, in], contiguous.
    """
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or not x.numel():
        return linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def has_onednn() -> bool:
    """Whether this build of PyTorch has the operation."""
    is_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
