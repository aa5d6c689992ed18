"""The format of a model's weights: their dtype, and quantisation while the model is loaded.

Wrapped layers call their base layer and add their deltas to its output, so that any quantised
linear layer serves as one. Weights are never read.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import nn

from loradock.engine.config import LORA_DTYPES, EngineConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.kernels.packed_linear import has_fast_products
from loradock.engine.models.library.names import (
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    NameAbsent,
    TorchAoConfig,
)
from loradock.engine.parallel import ParallelGroup
from loradock.messages.engine_options import QUANTIZATIONS, UNQUANTIZED


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415 - an extra, slow to load

    return TorchAoConfig(Int8WeightOnlyConfig())


def _torchao_int4() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig  # noqa: PLC0415 - an extra, slow to load

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4))  # type: ignore[attr-defined]


_MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "torchao-int8": _torchao_int8,
    "torchao-int4": _torchao_int4,
    "bitsandbytes-8bit": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-4bit": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    "fp8": FineGrainedFP8Config,
}


def dtype_of(
    config: EngineConfig, model_config: Any, group: ParallelGroup
) -> torch.dtype | Literal["auto"]:
    """Return the dtype to load a model in; "auto" is the one that it was saved in.

    Weights in half precision are loaded in float32 on a processor without instructions for them,
    except by several ranks, whose processors may differ.
    """
    if config.dtype != "auto":
        return LORA_DTYPES[config.dtype]
    saved = getattr(model_config, "dtype", None)
    is_quantized = config.quantization != UNQUANTIZED or hasattr(
        model_config, "quantization_config"
    )
    if saved is None or is_quantized or config.torch_device.type != "cpu" or not group.is_trivial:
        return "auto"
    return saved if has_fast_products(saved) else torch.float32


def loading_options(name: str, model_config: Any, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a quantisation of `QUANTIZATIONS`.

    Raises `ModelRefused` for a model that was saved quantised, and for a library that is missing.
    """
    if name == UNQUANTIZED:
        return {}
    if getattr(model_config, "quantization_config", None) is not None:
        raise ModelRefused(
            f"quantization is {name!r}, and the model was saved quantised; leave it out"
        )
    if name not in QUANTIZATIONS:
        raise ModelRefused(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {name!r}")
    try:
        made = _MAKERS[name]()
    except (ImportError, NameAbsent) as error:
        raise ModelRefused(
            f"quantization is {name!r}, and its library is missing ({error}); install "
            "loradock[quantization]"
        ) from error
    return {"quantization_config": made, "device_map": {"": device}}


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model was quantised, when it was saved or while it was loaded."""
    config = getattr(model, "config", None)
    return getattr(config, "quantization_config", None) is not None
