"""Loading of a saved model: read it, check the configuration against it, split it, and prepare it.

A model or setting that can't be served correctly is refused at start, with the reason.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import ImagesRefused, Processor, load_processor
from loradock.engine.models.library.light_imports import without_compiler
from loradock.engine.models.library.names import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    disable_progress_bar,
)
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.preparation import CLASSIFIERS
from loradock.engine.models.saved_settings import (
    PoolingOptions,
    Task,
    dtype_of,
    is_quantized,
    loader_of,
    loading_options,
    pooling_options,
    task_of,
)
from loradock.engine.models.saved_weights import LOCAL, Report, WeightsSource, reporting
from loradock.engine.models.served_model import ServedModel, Tokenizer
from loradock.engine.models.sharding import Sharding, experts_of
from loradock.engine.parallel import SINGLE, ParallelGroup

MODALITY: Final = "image"
"""The only content of prompts next to text, by its name in `default_mm_loras`."""

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

_OPTIONAL_WEIGHTS: Final[Mapping[Task, frozenset[str]]] = {
    "embed": frozenset({"pooler"}),
    "classify": frozenset(CLASSIFIERS),
}
"""Weights that a saved model can lack: an unused pooler, and a head that adapters contain."""

_NAMED_MAX: Final = 5


class _LoadedModel(NamedTuple):
    """The content of a model's directory on the host: whole, or this rank's part of the model."""

    model: PreTrainedModel
    sharding: Sharding | None
    task: Task
    tokenizer: Tokenizer
    options: PoolingOptions
    without_head: bool


def load_model(
    config: EngineConfig,
    lora_config: LoRAConfig,
    group: ParallelGroup = SINGLE,
    report: Report = lambda _done, _total: None,
) -> CausalModel | PoolingModel:
    """Load `config.model_directory` (safetensors, no network, no code from it) and prepare it.

    Every rank of `group` reads and keeps its part; collective. `report` is called while weights
    are read. Raises `ModelRefused`.
    """
    # A progress bar would overwrite log lines on stderr.
    disable_progress_bar()
    with reporting(report):
        saved = _read(config, lora_config, group)
    if config.torch_device.type == "cuda":
        # It comes first, and takes 0.1 to 0.4 s to plan each new shape of its operands.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if saved.sharding is None:
        # One rank shards nothing; the sharded classes would only be slower.
        lora_config = replace(lora_config, fully_sharded_loras=False)
        _move_to_device(saved.model, config)
    else:
        saved.sharding.check(config.torch_device)
    prepared = _prepare(saved, config, lora_config)
    prepared.group, prepared.without_head = group, saved.without_head
    _check_use_of_images(prepared, lora_config)
    return prepared


def _read(config: EngineConfig, lora_config: LoRAConfig, group: ParallelGroup) -> _LoadedModel:
    directory = config.model_directory
    if not (directory / "config.json").is_file():
        raise ModelRefused(f"{directory} has no config.json; set the directory of a saved model")
    try:
        model_config = AutoConfig.from_pretrained(directory, **LOCAL)
        task = task_of(directory, model_config, config.task)
        options = pooling_options(config, task)
        quantization = loading_options(config.quantization, model_config, config.torch_device)
        is_plain = not (is_quantized(model_config) or quantization)
        if not (group.is_trivial or is_plain):
            raise ModelRefused(
                "the model is quantised, and its layers can't be split; serve it on one rank"
            )
        dtype = dtype_of(config, model_config, group)
        source = WeightsSource(directory, loader_of(task, model_config), model_config, dtype)

        def split(model: PreTrainedModel) -> Sharding:
            _check_use_of_experts(model, config, lora_config)
            sharding = Sharding(model, group, config.expert_parallel)
            sharding.apply()
            return sharding

        with without_compiler() if is_plain else nullcontext():
            if group.is_trivial:
                model, missing = source.read(**quantization)
                _check_use_of_experts(model, config, lora_config)
                sharding = None
            else:
                sharding, missing = source.read_parts(split)
                model = sharding.model
        without_head = _check_weights(directory, missing, task)
        tokenizer = _load_tokenizer(directory)
        return _LoadedModel(model, sharding, task, tokenizer, options, without_head)
    except ModelRefused:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        raise ModelRefused(f"{directory} can't be loaded, task {config.task}: {error}") from error


def _move_to_device(model: PreTrainedModel, config: EngineConfig) -> None:
    try:
        device = config.torch_device
        if device.index:
            # Kernels are launched on the thread's current device, not where their operands are.
            torch.cuda.set_device(device)
        if not is_quantized(model.config):
            # A quantised model is on its device already, and some kinds can't be moved.
            model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelRefused(f"the model can't be moved to {config.device}: {error}") from error


def _prepare(
    saved: _LoadedModel, config: EngineConfig, lora_config: LoRAConfig
) -> CausalModel | PoolingModel:
    model, tokenizer, tokens_max = saved.model, saved.tokenizer, config.max_model_len
    if saved.task == "generate":
        processor = _find_processor(config.model_directory, model.config)
        return CausalModel(model, lora_config, tokenizer, tokens_max, processor)
    return PoolingModel(model, lora_config, tokenizer, tokens_max, saved.task, saved.options)


def _check_use_of_experts(
    model: PreTrainedModel, config: EngineConfig, lora_config: LoRAConfig
) -> None:
    if config.expert_parallel and not experts_of(model):
        raise ModelRefused("expert_parallel is on, and the model has no experts; leave it off")
    if config.expert_parallel and lora_config.fully_sharded_loras:
        raise ModelRefused(
            "expert_parallel and fully_sharded_loras are both on; adapters of whole experts can't "
            "be sharded: set only one of the two"
        )


def _check_weights(directory: Path, missing: Iterable[str], task: Task) -> bool:
    """Return whether a classifier was saved without its head, which adapters must then contain.

    Raises `ModelRefused` for any other needed weights that the library initialized at random.
    """
    optional = _OPTIONAL_WEIGHTS.get(task, frozenset())
    needed = sorted(name for name in missing if optional.isdisjoint(name.split(".")))
    if needed:
        raise ModelRefused(
            f"{directory} has no weights for {len(needed)} tensors of a model that is to {task}: "
            f"{', '.join(needed[:_NAMED_MAX])}{', ...' if len(needed) > _NAMED_MAX else ''}; save "
            "the whole model, or serve it for another task"
        )
    return task == "classify" and any(missing)


def _check_use_of_images(model: ServedModel, lora_config: LoRAConfig) -> None:
    """Refuse adapters for a part of the model or a modality that no prompt reaches."""
    is_unused = lora_config.enable_tower_connector_lora and model.no_images_reason
    if is_unused and model.image_part is not None:
        raise ModelRefused(
            "enable_tower_connector_lora is set, and the model is served for text alone: "
            f"{model.no_images_reason}"
        )
    for modality in lora_config.default_mm_loras or ():
        if modality != MODALITY:
            raise ModelRefused(
                f"default_mm_loras has an adapter for {modality!r}; prompts contain only text and "
                f"{MODALITY!r}"
            )
        if model.no_images_reason:
            raise ModelRefused(
                f"default_mm_loras has an adapter for {modality!r}, and the model is served for "
                f"text alone: {model.no_images_reason}"
            )


def _find_processor(directory: Path, config: Any) -> Processor | ImagesRefused:
    try:
        return load_processor(directory, config)
    except ImagesRefused as refusal:
        return refusal


def _load_tokenizer(directory: Path) -> Tokenizer:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(directory, **LOCAL)
