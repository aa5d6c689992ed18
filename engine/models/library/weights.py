"""Loading of saved weights: conversions of names and tensors, quantisation, and progress."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import transformers
from transformers import conversion_mapping, core_model_loading
from transformers.utils import logging

from loradock.engine.models.library.stand_ins import find

if TYPE_CHECKING:
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

disable_progress_bar: Callable[[], None] = getattr(logging, "disable_progress_bar", lambda: None)
set_tqdm_hook: Callable[[Any], Any] = getattr(logging, "set_tqdm_hook", lambda _: None)


def __getattr__(name: str) -> Any:
    """Return a name of the library's modules, or its stand-in."""
    if name.endswith("Config"):
        return find(transformers, name)
    return find(conversion_mapping if name.startswith("get_") else core_model_loading, name)
