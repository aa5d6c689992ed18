"""Loading of saved weights: conversions of names and tensors, quantisation, and progress."""

from transformers import BitsAndBytesConfig, FineGrainedFP8Config, TorchAoConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

__all__ = [
    "BitsAndBytesConfig",
    "Concatenate",
    "FineGrainedFP8Config",
    "MergeModulelist",
    "TorchAoConfig",
    "WeightConverter",
    "WeightRenaming",
    "disable_progress_bar",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "rename_source_key",
    "set_tqdm_hook",
]
