"""The dtype in which a delta is computed on a CPU, and the form of a narrow bfloat16 product."""

from functools import cache
from typing import Final

import torch

from loradock.engine.kernels.operands import accumulator_dtype

NARROW_RANK_MAX: Final = 16
NARROW_ROWS_MIN: Final = 32
"""Limits within which bfloat16 products are computed as `A @ x.T`: rank at most, rows at least."""

CONVERTED_MAX: Final = 3 << 17
"""The most (rows + 2) * rank * width for which bfloat16 weights are multiplied in float32.

A call of a bfloat16 product takes 12 us, whatever its size; a conversion and a float32 product of
few rows take less up to about this size.
"""


def wide_dtype(activation_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which intermediate results are rounded only once."""
    return accumulator_dtype(torch.promote_types(activation_dtype, weight_dtype))


def native_dtype(activation_dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that is closest to the operands' and has fast products.

    float16 is computed in float32 because CPUs have no fast float16 product, and so are mixed
    dtypes.
    """
    if activation_dtype == weight_dtype == torch.bfloat16:
        return torch.bfloat16
    return wide_dtype(activation_dtype, weight_dtype)


def looped_dtype(native: torch.dtype, rows: int, weights: int) -> torch.dtype:
    """Return the dtype of products of `rows` rows with `weights` weights each."""
    converts = native == torch.bfloat16 and (rows + 2) * weights <= CONVERTED_MAX
    return torch.float32 if converts else native


def computes_transposed(dtype: torch.dtype, rank: int, rows: int) -> bool:
    """Return whether the first product is computed as `A @ x.T`, with a transposed result.

    The library packs the right operand of a bfloat16 product into wide blocks, which a narrow A
    fills badly. With x as the right operand, a long run's delta took 0.86 of the time at rank 16,
    but 1.2 to 1.4 times as long on a processor whose tiles multiply bfloat16.
    """
    is_narrow = rank <= NARROW_RANK_MAX and rows >= NARROW_ROWS_MIN
    return dtype == torch.bfloat16 and is_narrow and not _has_bfloat16_tiles()


@cache
def _has_bfloat16_tiles() -> bool:
    """Return whether this processor multiplies bfloat16 by tiles (AMX)."""
    # PyTorch 2.11 may lack it.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("amx_bf16", False)
