"""The tasks of models: to generate, to embed, or to classify; and the task of a saved model.

A task that the configuration names is used; only "auto" is resolved from the saved model.
"""

from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from loradock.engine.models.library.registry import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from loradock.messages.views import PoolingTask

Task = Literal["generate"] | PoolingTask

TASKS: Final[tuple[Task, ...]] = ("generate", *get_args(PoolingTask))

_AUTO_CLASSES: Final[dict[Task, Any]] = {
    "generate": AutoModelForCausalLM,
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
}

_CLASSES_FOR: Final[dict[Task, frozenset[str]]] = {
    "generate": frozenset(
        (
            *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
            *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
        )
    ),
    "classify": frozenset(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()),
}

SENTENCE_MODULES: Final = "modules.json"
"""The file that marks models of sentence-transformers: the steps from a text to a vector."""

SENTENCE_CONFIG: Final = "config_sentence_transformers.json"
"""The optional file of their further settings."""


def loader_of(task: Task, config: Any) -> Any:
    """Return the class that loads a model with this config for a task."""
    if task == "generate" and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return _AUTO_CLASSES[task]


def task_of(directory: Path, config: Any, configured: str) -> Task:
    """Return the task of the model that was saved in `directory`; `configured` may be "auto".

    A model saved by sentence-transformers embeds, regardless of the class its weights were trained
    in. Otherwise the class that the config names decides, and a model without a head embeds.
    """
    for task in TASKS:
        if task == configured:
            return task
    if _is_sentence_model(directory):
        return "embed"
    classes = set(config.architectures or ())
    return next((task for task, names in _CLASSES_FOR.items() if classes & names), "embed")


def _is_sentence_model(directory: Path) -> bool:
    """Whether sentence-transformers saved it as an embedder; it also saves classifiers of pairs."""
    if not (directory / SENTENCE_MODULES).is_file():
        return False
    path = directory / SENTENCE_CONFIG
    saved = msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    return bool(saved.get("model_type", "SentenceTransformer") == "SentenceTransformer")
