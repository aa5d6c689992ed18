"""The settings of a saved model: its task, the format of its weights, and how texts are pooled.

A task that the configuration names is used; only "auto" is resolved from the saved model. A setting
that is not served stops the start, because results would differ. Wrapped layers call their base
layer and add their deltas to its output, so any quantised linear layer serves as a base layer;
its weights are never read.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec
import torch

from loradock.engine.config import LORA_DTYPES, EngineConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.kernels.packed_linear import has_fast_products
from loradock.engine.models.library.names import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    NameAbsent,
    TorchAoConfig,
    is_kernels_available,
)
from loradock.engine.parallel import ParallelGroup
from loradock.messages.engine_options import UNQUANTIZED
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
    """Return the task of the model that was saved in `directory`; `configured` can be "auto".

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
    """Return whether sentence-transformers saved it as an embedder; it also saves classifiers of
    pairs.
    """
    if not (directory / SENTENCE_MODULES).is_file():
        return False
    path = directory / SENTENCE_CONFIG
    saved = msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    return bool(saved.get("model_type", "SentenceTransformer") == "SentenceTransformer")


class Pooling(StrEnum):
    """The hidden states that make a text's vector: their mean, the first token's, or the last's."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


class PoolingOptions(NamedTuple):
    """The settings of an embedding model.

    `pooling` None: the mean, or the last token if tokens attend only to those before them.
    `normalize`: vectors have length 1. `tokens_max` 0: no limit except the model's own. `prompt` is
    prepended to every text; with `pools_prompt` off its tokens are left out of the vector.
    """

    pooling: Pooling | None = None
    normalize: bool = False
    tokens_max: int = 0
    prompt: str = ""
    pools_prompt: bool = True


NO_OPTIONS: Final = PoolingOptions()
"""The options of a model whose files specify none."""

_PACKAGE: Final = "sentence_transformers."
_STEPS: Final = ("Transformer", "Pooling", "Normalize")

_POOLINGS: Final = {
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
"""Names of served poolings in a list of modes, and as the flags of older models."""

_SERVED_SETTINGS: Final[Mapping[str, tuple[object, ...]]] = {
    "do_lower_case": (None, False),
    "transformer_task": (None, "feature-extraction"),
    "module_output_name": (None, "token_embeddings"),
    "processing_kwargs": (None, {}),
}
"""Served values of settings in the first step's file, by key; others change how texts are read."""

_STATES: Final = {"method": "forward", "method_output_name": "last_hidden_state"}
"""The hidden states that a vector is made from, if that file specifies them."""


def pooling_options(config: EngineConfig, task: Task) -> PoolingOptions:
    """Return the saved model's settings, overridden by the configuration.

    Raises `ModelRefused` for a saved model with steps or poolings that are not served, and for a
    configuration with embedding settings for a model of another task.
    """
    if task != "embed":
        if config.pooling != "auto" or config.normalize is not None:
            raise ModelRefused(
                f"pooling or normalize is set, and this model's task is {task}; both are for "
                "embedding: leave them out"
            )
        return NO_OPTIONS
    directory = config.model_directory
    chosen = None if config.pooling == "auto" else Pooling(config.pooling)
    saved = PoolingOptions(chosen)
    if (directory / SENTENCE_MODULES).is_file():
        saved = _read_sentence_transformer(directory, chosen)
    return saved if config.normalize is None else saved._replace(normalize=config.normalize)


def _read_sentence_transformer(directory: Path, chosen: Pooling | None) -> PoolingOptions:
    try:
        paths = _step_paths(directory)
        pooling, pools_prompt = chosen, True
        if "Pooling" in paths:
            saved = _read(directory / paths["Pooling"] / "config.json")
            pooling = chosen or _pooling_of(saved, directory)
            pools_prompt = saved.get("include_prompt") is not False
        prompt = _default_prompt(directory)
        if prompt and not pools_prompt and pooling is Pooling.CLS:
            raise ModelRefused(
                f"{directory} pools the first token and leaves its prompt out; libraries differ in "
                "which token is the first then, so that is not served: choose another --pooling"
            )
        tokens_max = _tokens_max(directory)
        return PoolingOptions(pooling, "Normalize" in paths, tokens_max, prompt, pools_prompt)
    except ModelRefused:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(
            f"{directory}: {SENTENCE_MODULES} or a file that it names does not have the format of "
            f"sentence-transformers: {type(error).__name__}: {error}"
        ) from error


def _step_paths(directory: Path) -> dict[str, str]:
    """Return the path of each step's files; refuse unknown steps, or another order."""
    steps = [(str(step["type"]), str(step["path"])) for step in _read(directory / SENTENCE_MODULES)]
    types = [kind for kind, _ in steps]
    paths = {kind.rpartition(".")[2]: path for kind, path in steps}
    is_known = all(kind.startswith(_PACKAGE) for kind in types)
    in_order = [*paths] == [step for step in _STEPS if step in paths]
    if not is_known or len(paths) != len(types) or not in_order:
        raise ModelRefused(
            f"{directory} embeds with the steps {', '.join(types)}; served are sentence-"
            f"transformers' own {', '.join(_STEPS)}, in this order"
        )
    if paths.get("Transformer"):
        raise ModelRefused(
            f"{directory} has its weights in {paths['Transformer']!r}; they are read only from the "
            f"folder of {SENTENCE_MODULES}: move them there"
        )
    return paths


def _pooling_of(saved: Mapping[str, Any], directory: Path) -> Pooling:
    """Return the saved pooling, or the mean if none is specified."""
    mode = saved.get("pooling_mode")
    if mode is None:
        mode = [name for name, on in saved.items() if name.startswith("pooling_") and on is True]
    modes = [mode] if isinstance(mode, str) else sorted(mode)
    unknown = set(modes).difference(_POOLINGS)
    if unknown:
        raise ModelRefused(
            f"{directory} embeds with the poolings {sorted(unknown)}; served are "
            f"{', '.join(_POOLINGS)}"
        )
    if len(modes) > 1:
        raise ModelRefused(
            f"{directory} pools by {modes}; only one is served: choose it with --pooling"
        )
    return _POOLINGS[modes[0]] if modes else Pooling.MEAN


def _default_prompt(directory: Path) -> str:
    """Return the text to prepend to every input; empty if the model names none."""
    path = directory / SENTENCE_CONFIG
    saved = _read(path) if path.is_file() else {}
    name, prompts = saved.get("default_prompt_name"), saved.get("prompts") or {}
    if name is None:
        return ""
    if name not in prompts:
        raise ModelRefused(
            f"{path} has the default prompt {name!r}, and prompts only for {sorted(prompts)}"
        )
    return str(prompts[name] or "")


def _tokens_max(directory: Path) -> int:
    """Return the most tokens of a text, 0 if unspecified; refuse settings that are not served.

    Older versions named the file after the kind of model, newer ones after BERT.
    """
    path = min(directory.glob("sentence_*_config.json"), default=None)
    saved = {} if path is None else _read(path)
    texts = saved.get("modality_config", {"text": _STATES}).get("text")
    for key, found, served in (
        *((key, saved.get(key), served) for key, served in _SERVED_SETTINGS.items()),
        ("modality_config", texts, (_STATES,)),
    ):
        if found not in served:
            raise ModelRefused(
                f"{path} has {key}: {found!r}; served are {', '.join(map(repr, served))}"
            )
    return int(saved.get("max_seq_length") or 0)


def _read(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())


def _torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415 - an extra, slow to load

    return TorchAoConfig(Int8WeightOnlyConfig())


def _torchao_int4() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig  # noqa: PLC0415 - an extra, slow to load

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4))  # type: ignore[attr-defined]


_FP8: Final = "fp8"
_QUANTIZATION_MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "torchao-int8": _torchao_int8,
    "torchao-int4": _torchao_int4,
    "bitsandbytes-8bit": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes-4bit": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    _FP8: FineGrainedFP8Config,
}


def dtype_of(
    config: EngineConfig, model_config: Any, group: ParallelGroup
) -> torch.dtype | Literal["auto"]:
    """Return the dtype to load a model in; "auto" is the dtype that it was saved in.

    Weights in half precision are loaded in float32 on a processor without instructions for them,
    except by several ranks, whose processors can differ.
    """
    if config.dtype != "auto":
        return LORA_DTYPES[config.dtype]
    saved = getattr(model_config, "dtype", None)
    is_plain = config.quantization == UNQUANTIZED and not is_quantized(model_config)
    is_on_cpu = config.torch_device.type == "cpu"
    if saved is None or not (is_plain and is_on_cpu and group.is_trivial):
        return "auto"
    return saved if has_fast_products(saved) else torch.float32


def loading_options(name: str, model_config: Any, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a quantisation of `QUANTIZATIONS`.

    Raises `ModelRefused` for a model that was saved quantised, and for a library that is missing;
    the missing library of a model that was saved in fp8 is refused too.
    """
    saved = getattr(model_config, "quantization_config", None) or {}
    method = saved.get("quant_method") if isinstance(saved, dict) else saved.quant_method
    if _FP8 in (name, method) and device.type == "cuda" and not is_kernels_available():
        raise ModelRefused(
            "the model is quantised to fp8, whose products on CUDA are in the package kernels, and "
            "it is not installed; install kernels, or serve the model without fp8"
        )
    if name == UNQUANTIZED:
        return {}
    if is_quantized(model_config):
        raise ModelRefused(
            f"quantization is {name!r}, and the model was saved quantised; leave it out"
        )
    try:
        made = _QUANTIZATION_MAKERS[name]()
    except (ImportError, NameAbsent) as error:
        raise ModelRefused(
            f"quantization is {name!r}, and its library is missing ({error}); install "
            "loradock[quantization]"
        ) from error
    return {"quantization_config": made, "device_map": {"": device}}


def is_quantized(model_config: Any) -> bool:
    """Return whether a model was quantised, when it was saved or while it was loaded."""
    return getattr(model_config, "quantization_config", None) is not None
