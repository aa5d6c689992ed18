"""Models, configurations and processors, and the classes that find them for a saved model."""

from typing import TYPE_CHECKING, Any

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    pytorch_utils,
)
from transformers.models.auto import processing_auto
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from loradock.engine.models.library.stand_ins import find

if TYPE_CHECKING:
    from transformers import AutoImageProcessor, ProcessorMixin
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )
    from transformers.pytorch_utils import Conv1D

__all__ = [
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "PROCESSOR_MAPPING",
    "AutoConfig",
    "AutoImageProcessor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
    "Conv1D",
    "GenerationConfig",
    "PreTrainedConfig",
    "PreTrainedModel",
    "ProcessorMixin",
    "processor_class_from_name",
]

_MODULES = {
    "AutoImageProcessor": transformers,
    "Conv1D": pytorch_utils,
    "PROCESSOR_MAPPING": processing_auto,
    "ProcessorMixin": transformers,
    "processor_class_from_name": processing_auto,
}


def __getattr__(name: str) -> Any:
    """Return a name that only some models need, or its stand-in."""
    if name not in _MODULES:
        raise AttributeError(name)
    return find(_MODULES[name], name)
