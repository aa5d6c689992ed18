"""Quantisation of a model while it is loaded, where it was not saved quantised.

Wrapped layers call their base layer and add their deltas to its output, so that any quantised
linear layer serves as one. Weights are never read.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, PreTrainedModel, TorchAoConfig

from engine.config import QUANTIZATIONS, UNQUANTIZED
from engine.errors import ModelRefused


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
        raise ModelRefused(f"quantization is {name!r}; one of {', '.join(QUANTIZATIONS)}")
    try:
        made = _MAKERS[name]()
    except ImportError as error:
        raise ModelRefused(
            f"quantization is {name!r}, and its library is missing ({error}); install "
            "loradock[quantization]"
        ) from error
    return {"quantization_config": made, "device_map": {"": device}}


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether a model was quantised, when it was saved or while it was loaded."""
    return getattr(model.config, "quantization_config", None) is not None
