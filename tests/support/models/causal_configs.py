"""Tiny instances of every causal architecture of the installed `transformers`."""

from collections.abc import Mapping
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.models.causal_fields import FIELDS
from tests.support.models.common_fields import COMMON, Fields

SAME: Final[Mapping[str, str]] = {
    "gpt-sw3": "gpt2",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "dots3_note": "dots3_note_text",
    "gemma4_unified": "gemma4_unified_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}
"""Types whose causal model is that of another type, with the same or the nested configuration."""

_ASSISTANT: Final = (
    "it drafts for another model, whose keys all its layers must share, and generates nothing alone"
)

NOT_BUILDABLE: Final[Mapping[str, str]] = {
    "gemma3n": "its vision tower needs the library timm; its language model is gemma3n_text",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
}

DECODERS: Final[Mapping[str, str]] = {
    "musicgen": "musicgen_decoder",
    "musicgen_melody": "musicgen_melody_decoder",
}
"""Types whose causal model has the configuration of a part of the whole."""


def causal_types() -> tuple[str, ...]:
    """Return every model type that `AutoModelForCausalLM` knows and that is not in `SAME`."""
    return tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in SAME)


def build_config(model_type: str) -> PreTrainedConfig:
    """Return the tiny configuration of a type; its nested ones have the same common fields."""
    own = FIELDS.get(model_type, {})
    config_class = CONFIG_MAPPING[DECODERS.get(model_type, model_type)]
    fields = {**_known(config_class), **own}
    if "text_config" in own:
        nested = own["text_config"]
        text_class = config_class.sub_configs["text_config"]
        if text_class is AutoConfig:
            text_class = CONFIG_MAPPING[nested["model_type"]]
        fields["text_config"] = _present({**_known(text_class), **nested})
    return config_class(**_present(fields))


def build_model(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random instance of a type, the same every time."""
    torch.manual_seed(1)
    config = build_config(model_type)
    model: PreTrainedModel
    if model_type in DECODERS:
        model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config)
        return model.to(dtype).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _known(config_class: type[PreTrainedConfig]) -> Fields:
    """Return the common fields that a class knows; others would change how caches are made."""
    names = set(config_class.attribute_map)
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return {name: value for name, value in COMMON.items() if name in names}


def _present(fields: Fields) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
