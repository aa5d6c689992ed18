"""Names of the library: models, caches, loading of weights; with stand-ins for those that it lacks.

What most models do without can be absent from a version. Using it then fails like a model's own
code that is called in an unsupported way, so the probe that needs it is refused, with the name in
its reason, and a slower way to run rows is chosen.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

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
    cache_utils,
    conversion_mapping,
    core_model_loading,
    masking_utils,
    modeling_utils,
    pytorch_utils,
)
from transformers.models.auto import processing_auto
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import is_kernels_available, logging

if TYPE_CHECKING:
    from transformers import (
        AutoImageProcessor,
        BitsAndBytesConfig,
        FineGrainedFP8Config,
        ProcessorMixin,
        TorchAoConfig,
    )
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DummyLayer,
        DynamicCache,
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionLayer,
    )
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
    from transformers.modeling_utils import AttentionInterface
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
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoConfig",
    "AutoImageProcessor",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "AutoTokenizer",
    "BitsAndBytesConfig",
    "Cache",
    "CacheLayerMixin",
    "Concatenate",
    "Conv1D",
    "DummyLayer",
    "DynamicCache",
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "FineGrainedFP8Config",
    "GenerationConfig",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
    "MergeModulelist",
    "NameAbsent",
    "PreTrainedConfig",
    "PreTrainedModel",
    "ProcessorMixin",
    "TorchAoConfig",
    "WeightConverter",
    "WeightRenaming",
    "causal_mask_function",
    "disable_progress_bar",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "is_kernels_available",
    "processor_class_from_name",
    "rename_source_key",
    "set_tqdm_hook",
]

_MODULES: Final[tuple[ModuleType, ...]] = (
    *(cache_utils, conversion_mapping, core_model_loading, masking_utils, modeling_utils),
    *(processing_auto, pytorch_utils, transformers),
)
"""The modules in which a name is looked up, in this order."""

disable_progress_bar: Callable[[], None] = getattr(logging, "disable_progress_bar", lambda: None)
set_tqdm_hook: Callable[[Any], Any] = getattr(logging, "set_tqdm_hook", lambda _: None)


class NameAbsent(AttributeError):  # noqa: N818 - named by what was found, as the engine's errors
    """This version of the library has no such name."""


class _StandIn:
    """A class of which there are no objects; calling a function that is absent is the same."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NameAbsent(f"this version of transformers has no {type(self).__name__}")

    @classmethod
    def register(cls, *_: object) -> None:
        """Ignore an implementation, which nothing can choose."""


@cache
def __getattr__(name: str) -> Any:
    """Return a name of the library, or a class that stands in for it."""
    if name not in __all__:
        raise AttributeError(name)
    for module in _MODULES:
        try:
            return getattr(module, name)
        except (AttributeError, ImportError):
            continue
    return type(name, (_StandIn,), {})
