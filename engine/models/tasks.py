"""What a model is for: to generate, to embed, or to classify.

What it is: the task that a saved model's config tells. What it is not: a list of model names; the
library's own tables say what each class is for. One rule: what a person asks for is done, and only
what nobody asked for is guessed.
"""

from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from messages.requests import PoolingTask

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
"""The file by which sentence-transformers marks its models: the steps from a text to a vector."""

SENTENCE_CONFIG: Final = "config_sentence_transformers.json"
"""Its settings beside the steps, where there are any."""


def loader_of(task: Task, config: Any) -> Any:
    """The class that loads a model with this config for a task."""
    if task == "generate" and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return _AUTO_CLASSES[task]


def task_of(directory: Path, config: Any, wanted: str) -> Task:
    """What the model saved in `directory` with this config is for; `wanted` may be "auto".

    One saved by sentence-transformers embeds, whatever class its weights were trained in; else the
    class that the config names decides, and one without a head embeds.
    """
    for task in TASKS:
        if task == wanted:
            return task
    if _is_sentence_model(directory):
        return "embed"
    classes = set(config.architectures or ())
    return next((task for task, names in _CLASSES_FOR.items() if classes & names), "embed")


def _is_sentence_model(directory: Path) -> bool:
    """Whether sentence-transformers saved it to embed; it saves classifiers (of pairs) too."""
    if not (directory / SENTENCE_MODULES).is_file():
        return False
    path = directory / SENTENCE_CONFIG
    saved = msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    return bool(saved.get("model_type", "SentenceTransformer") == "SentenceTransformer")
