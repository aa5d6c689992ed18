"""Scaled-dot-product attention: the backend that PyTorch 2.11 chooses on sm_90, its launches."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.device.graphs import record_operation
from tests.support.device.record import RECORD
from tests.support.device.streams import access_all, current_stream

scaled_dot_product_attention: Final = torch.nn.functional.scaled_dot_product_attention
_HALF: Final = (torch.float16, torch.bfloat16)
_MATH_LAUNCHES: Final = 20
_MASK_LAUNCHES: Final = 3
"""A mask of booleans becomes one of numbers, padded to a multiple of 8."""


def attend(  # noqa: PLR0913, PLR0917 - PyTorch's arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the output for tensors in host memory, and record the backend and its launches."""
    is_grouped = enable_gqa and query.shape[1] != key.shape[1]
    backend, launches = _backend(query, key, attn_mask, is_causal, is_grouped)
    mask = "" if attn_mask is None else "mask"
    RECORD.attention[backend, mask, "grouped" if is_grouped else ""] += 1
    RECORD.shapes[
        (tuple(query.shape), tuple(key.shape), None if attn_mask is None else attn_mask.shape)
    ] += 1
    options: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
    options |= {"scale": scale, "enable_gqa": enable_gqa}
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        out = scaled_dot_product_attention(query, key, value, **options)
    record_operation(scaled_dot_product_attention, (query, key, value), options, out)
    RECORD.launches["aten.scaled_dot_product_attention"] += launches
    launch = current_stream().launch()
    inputs = (query, key, value, *([] if attn_mask is None else [attn_mask]))
    access_all(inputs, False, launch, "attention")
    access_all((out,), True, launch, "attention")
    return out


def _backend(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, is_grouped: bool
) -> tuple[str, int]:
    """Return the backend's name and the number of its launches."""
    is_half, width = query.dtype in _HALF, query.shape[-1]
    of_mask = _MASK_LAUNCHES if mask is not None and mask.dtype == torch.bool else 0
    if is_half and width % 8 == 0 and width <= 256 and torch.backends.cuda.cudnn_sdp_enabled():
        return "cudnn", 1 + of_mask
    is_square = query.shape[2] == key.shape[2]
    if is_half and mask is None and (is_square or not is_causal):
        return "flash", 1
    if not is_grouped:
        return "efficient", 1 + (_MASK_LAUNCHES if mask is not None else 0)
    return "math", _MATH_LAUNCHES
