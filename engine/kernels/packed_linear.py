"""A base layer's own product on a CPU, with its weight packed once in oneDNN's layout.

A library packs the weight of a product first. PyTorch does so in every call, which for few rows
takes longer than the product itself.
"""

import platform
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

PACKED_ROWS_MIN: Final = 4
"""The least rows of a product with a packed weight; fewer are padded.

oneDNN's code for one and for two rows reads a packed weight more slowly than that for four.
"""

EXACT_ROWS_MAX: Final = 16
"""The most rows that are not rounded."""

_WRITTEN: Final = "a weight that was packed at load is written; change weights before that"


class PackedWeight(Tensor):
    """A weight `[out, in]` whose only copy is in oneDNN's layout.

    It has the shape, dtype and device of the weight, and every operation on it but `packed_linear`
    computes with an unpacked copy, which is equal bit by bit. Operations that write to it raise
    RuntimeError.
    """

    packed: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor) -> Self:
        """`packed`: a tensor in oneDNN's layout."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=packed.dtype, device=packed.device
        )
        made.packed = packed
        return made

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raise RuntimeError: it would write to an unpacked copy."""
        raise RuntimeError(_WRITTEN)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the weight itself, which nothing can change."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # it is declared as if it were static
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        first = args[0] if args else None
        # Views of a tensor, and parameters made from it, must not be inference tensors.
        with torch.inference_mode(False):
            if isinstance(first, PackedWeight):
                if func is torch.ops.aten.detach.default:
                    return cls(first.packed)
                if func._schema.is_mutable:
                    raise RuntimeError(_WRITTEN)
            dense: Any = tree_map_only(PackedWeight, _unpacked, (args, kwargs or {}))
            return func(*dense[0], **dense[1])


def _unpacked(weight: PackedWeight) -> Tensor:
    dense: Tensor = weight.packed.to_dense()
    return dense


def can_pack(weight: Tensor) -> bool:
    """Return whether this processor multiplies packed weights of this kind and dtype."""
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return False
    is_plain = type(weight.data) is Tensor and weight.ndim == 2 and weight.numel() > 0
    return is_plain and has_onednn(weight.dtype)


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes products of this dtype on this processor."""
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_built or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether this processor has instructions for products of this dtype."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if dtype != torch.bfloat16:
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return has_onednn(dtype)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pack_weight(weight: Tensor) -> PackedWeight:
    """Return the weight in oneDNN's layout, which is a copy; `can_pack` must hold for it."""
    with torch.inference_mode(False), torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
        return PackedWeight(packed)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, [..., out], by oneDNN.

    x: [..., in], at least one row, of any strides. weight: [out, in], packed or of any strides.
    bias: [out]; all of one dtype.
    """
    rows = x.numel() // x.shape[-1]
    size = rows if rows <= EXACT_ROWS_MAX else rounded_rows(rows)
    if isinstance(weight, PackedWeight):
        weight, size = weight.packed, max(size, PACKED_ROWS_MIN)
    # The operation reads a bias as if it were contiguous.
    dense = None if bias is None else bias.contiguous()
    if size == rows:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, weight, dense, "none", [], ""
        )
        return product
    padded = x.new_zeros(size, x.shape[-1])
    padded[:rows] = x.reshape(rows, -1)
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(padded, weight, dense, "none", [], "")
    return y[:rows].view(*x.shape[:-1], -1)


def rounded_rows(rows: int) -> int:
    """Return the number of rows, above `EXACT_ROWS_MAX` rounded up to four binary digits.

    oneDNN makes code for each shape that it meets, in about a millisecond, and keeps half a MiB for
    each of the last thousand. Steps with prompts have any number of rows.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step
