"""The base model, prepared once: loaded, its layers wrapped, and proved fit for batches.

What it is: a `transformers` model from a local directory, and the forward pass of those that
generate. What it is not: generation, the choice of layers, or a holder of adapter weights. One
rule: what can't be served rightly is refused when the engine starts, with the reason, and never
found out by a request.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils.logging import disable_progress_bar

from engine.config import EngineConfig, LoRAConfig
from engine.errors import ModelRefused
from engine.kv_cache import RowCache, left_padding_mask
from engine.media import Media, media_arguments
from engine.media_probe import try_images
from engine.parallel import SINGLE, ParallelGroup
from engine.pooled_model import PooledModel
from engine.pooling_options import pooling_options
from engine.preparation import CLASSIFIERS
from engine.probe import generation_trial
from engine.processor import LOCAL, ImageReader, ImagesRefused, Processor, load_processor
from engine.served import ServedModel, Tokenizer
from engine.sharding import shard_model
from engine.tasks import Task, loader_of, task_of

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

MODALITY: Final = "image"
"""What prompts may bring beside text, as `default_mm_loras` calls it."""

_SPARED: Final[Mapping[Task, frozenset[str]]] = {
    "embed": frozenset({"pooler"}),
    "classify": frozenset(CLASSIFIERS),
}
"""What a saved model may lack: what no vector comes from, and a head that adapters bring."""

_NAMED_MAX: Final = 5

_NO_PROCESSOR: Final = ImagesRefused("the model was prepared without a processor")


class PreparedModel(ServedModel):
    """A causal language model, or the language part of an image-text model, to generate with.

    `context_tokens_max`: prompt and output of one row together. `eos_ids`: the tokens that end an
    output. `reader` reads prompts with images; it is None where they are refused, and then
    `without_images` says why.
    """

    task = "generate"

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        tokenizer: Tokenizer = None,
        context_tokens_max: int = 0,
        processor: Processor | ImagesRefused = _NO_PROCESSOR,
    ) -> None:
        """Wrap the layers of `model` in place; `processor` reads images, or says why none are."""
        super().__init__(model, tokenizer, context_tokens_max)
        self.eos_ids = _eos_ids(model, tokenizer)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self._prepare(generation_trial(self.forward), lora_config)
        self.reader, self.without_images = self._reader_of(processor)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, rows: RowCache, media: Sequence[Media | None] = ()
    ) -> Tensor:
        """The logits after each row's last token, [rows, vocabulary]; fills `rows` in place.

        input_ids: [rows, tokens] int64, on any device; a row that brings fewer tokens has padding
        on the left. `rows.lengths` already counts the new tokens, and `rows.offsets` the images.
        media: in a prefill with images, what each row has.
        """
        tokens = input_ids.shape[1]
        lengths, following = torch.tensor([rows.lengths, rows.positions], device=self.device)
        mask = left_padding_mask(lengths, rows.width + tokens)
        places = torch.arange(-tokens, 0, device=self.device)
        positions = (following[:, None] + places).clamp(min=0)
        own: dict[str, Tensor] = {}
        if any(media):
            found = media_arguments(media, positions.cpu())
            own = {name: tensor.to(self.device) for name, tensor in found.items()}
            positions = own.pop("position_ids")
        return self.run(input_ids.to(self.device), mask, positions, rows.cache, own)

    @torch.inference_mode()
    def run(
        self,
        input_ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: Cache,
        media: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The logits after the last column, [rows, vocabulary]; all tensors are on the device.

        input_ids: [rows, tokens] int64. mask: [rows, columns] int64, 1 for what a row may see.
        positions: [rows, tokens] int64, or what media make of them.
        """
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "past_key_values": cache,
            "use_cache": True,
            **(media or {}),
        }
        if "position_ids" in self._accepts:
            arguments["position_ids"] = positions
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = 1
        output = self.model(input_ids, **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits

    def _reader_of(self, processor: Processor | ImagesRefused) -> tuple[ImageReader | None, str]:
        """What reads images, once it is proved that they can be batched; else why they can't."""
        if isinstance(processor, ImagesRefused):
            return None, str(processor)
        try:
            reader = ImageReader(processor, self, self._accepts)
            try_images(self.forward, reader)
        except ImagesRefused as refusal:
            return None, str(refusal)
        return reader, ""


def prepare_loaded(model: PreTrainedModel, lora_config: LoRAConfig) -> PreparedModel | PooledModel:
    """Prepare a model that its owner has loaded, for what its head says that it is for."""
    if model.get_output_embeddings() is not None:
        return PreparedModel(model, lora_config)
    is_classifier = any(name in CLASSIFIERS for name, _ in model.named_children())
    return PooledModel(model, lora_config, task="classify" if is_classifier else "embed")


def load_model(
    config: EngineConfig, lora_config: LoRAConfig, group: ParallelGroup = SINGLE
) -> PreparedModel | PooledModel:
    """Read `config.model_directory` (safetensors, nothing remote, no foreign code) and prepare it.

    Every rank of `group` keeps its part; collective. Raises `ModelRefused`.
    """
    # What goes to stderr is for people to read; a bar is drawn over it.
    disable_progress_bar()
    directory = config.model_directory
    if not (directory / "config.json").is_file():
        raise ModelRefused(f"{directory} has no config.json; name a directory of a saved model")
    try:
        found = AutoConfig.from_pretrained(directory, **LOCAL)
        task = task_of(directory, found, config.task)
        options = pooling_options(config, task)
        model, report = loader_of(task, found).from_pretrained(
            directory, use_safetensors=True, dtype="auto", output_loading_info=True, **LOCAL
        )
        without_head = _check_weights(directory, report["missing_keys"], task)
        if group.is_single:
            if config.torch_device.index:
                # Kernels are launched on the thread's device, wherever their operands lie.
                torch.cuda.set_device(config.torch_device)
            model.to(config.torch_device)
        tokenizer = _load_tokenizer(directory)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        raise ModelRefused(
            f"{directory} can't be loaded, task {config.task}, on {config.device}: {error}"
        ) from error
    if group.is_single:
        # One rank has nobody to share with; the other classes would take the longer way.
        lora_config = replace(lora_config, fully_sharded_loras=False)
    else:
        if config.expert_parallel and lora_config.fully_sharded_loras:
            raise ModelRefused(
                "expert_parallel and fully_sharded_loras are both on; whole experts leave nothing "
                "of their adapters to shard: take one of the two"
            )
        group.wait_for_all()
        shard_model(model, group, config.torch_device, config.expert_parallel)
    prepared: PreparedModel | PooledModel
    tokens_max = config.context_tokens_max
    if task == "generate":
        processor = _find_processor(directory, found)
        prepared = PreparedModel(model, lora_config, tokenizer, tokens_max, processor)
    else:
        prepared = PooledModel(model, lora_config, tokenizer, tokens_max, task, options)
    prepared.group, prepared.without_head = group, without_head
    _check_use_of_images(prepared, lora_config)
    return prepared


def _check_weights(directory: Path, missing: Iterable[str], task: Task) -> bool:
    """Whether a classifier was saved without its head, which adapters then have to bring.

    Raises `ModelRefused` for anything else that answers need and the library made up at random.
    """
    spared = _SPARED.get(task, frozenset())
    needed = sorted(name for name in missing if spared.isdisjoint(name.split(".")))
    if needed:
        raise ModelRefused(
            f"{directory} has no weights for {len(needed)} tensors of a model that is to {task}: "
            f"{', '.join(needed[:_NAMED_MAX])}{', ...' if len(needed) > _NAMED_MAX else ''}; save "
            "the whole model, or serve it for another task"
        )
    return task == "classify" and any(missing)


def _check_use_of_images(model: ServedModel, lora_config: LoRAConfig) -> None:
    """Adapters for a part of the model or a modality that no prompt reaches would never be used."""
    if lora_config.enable_tower_connector_lora and model.without_images:
        raise ModelRefused(
            "enable_tower_connector_lora is set, and the model is served for text alone: "
            f"{model.without_images}"
        )
    for modality in lora_config.default_mm_loras or ():
        if modality != MODALITY:
            raise ModelRefused(
                f"default_mm_loras has an adapter for {modality!r}; prompts bring {MODALITY!r} "
                "beside text, and nothing else"
            )
        if model.without_images:
            raise ModelRefused(
                f"default_mm_loras has an adapter for {modality!r}, and the model is served for "
                f"text alone: {model.without_images}"
            )


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _find_processor(directory: Path, config: Any) -> Processor | ImagesRefused:
    try:
        return load_processor(directory, config)
    except ImagesRefused as refusal:
        return refusal


def _load_tokenizer(directory: Path) -> Tokenizer:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(directory, **LOCAL)
