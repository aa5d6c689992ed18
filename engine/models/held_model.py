"""Models that only the program which holds them runs: batches and caches are theirs.

A text model is observed in one plain forward, which shows the rows of its layers and which of them
share an input. Of any other module, such as a diffusion transformer, nothing but its layers is
known: they are not packed, and each one's input must have one row per entry of a mapping, in its
order: `index_mapping` for layers that see every token, `prompt_mapping` for those that see one row
per sample.
"""

import warnings
from typing import Final

import torch
from torch import Tensor, nn

from loradock.engine.adapters.target import Equivalence
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import ModelNotRun, ModelRefused
from loradock.engine.layers import (
    CONVOLUTION_WRAPPERS,
    VocabParallelEmbeddingWithLoRA,
    wrappers_for,
)
from loradock.engine.layers.convolution import refusal_of
from loradock.engine.models.image_part import ImageMapper
from loradock.engine.models.library.names import PreTrainedModel
from loradock.engine.models.observation import EVERY_TOKEN
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.preparation import (
    CLASSIFIERS,
    WrapScope,
    module_shapes,
    prepare_unprobed,
)
from loradock.engine.models.probing import ProbeSpec, Prompts
from loradock.engine.models.served_model import BasePaths, ServedModel

_TOKENS: Final = 16


def prepare_loaded(model: nn.Module, lora_config: LoRAConfig) -> ServedModel:
    """Prepare a model that was loaded elsewhere: for the task of its head, or as it is.

    Warns if a text model does not run with token ids alone, so that it is taken as it is.
    """
    if isinstance(model, PreTrainedModel) and _embeds_tokens(model):
        try:
            return _prepare_text_model(model, lora_config)
        except ModelNotRun as error:
            warnings.warn(f"the model is taken as it is, not tried out: {error}", stacklevel=5)
    return PlainModel(model, lora_config)


def _prepare_text_model(model: PreTrainedModel, lora_config: LoRAConfig) -> ServedModel:
    if model.get_output_embeddings() is not None:
        return HeldTextModel(model, lora_config)
    is_classifier = any(name in CLASSIFIERS for name, _ in model.named_children())
    return PoolingModel(model, lora_config, task="classify" if is_classifier else "embed")


def _embeds_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model of `transformers` reads text."""
    try:
        return isinstance(model.get_input_embeddings(), nn.Embedding)
    except (AttributeError, NotImplementedError):
        return False


class HeldTextModel(ServedModel):
    """A text model of `transformers` that its program runs, with its own cache or none."""

    task = "generate"

    def __init__(self, model: PreTrainedModel, lora_config: LoRAConfig) -> None:
        """Wrap the layers of `model` in place; raises `ModelRefused`, which changes nothing."""
        super().__init__(model, None, 0)
        spec = ProbeSpec(self._run, "a batch of rows of equal lengths", EVERY_TOKEN, True)
        self._prepare([spec], lora_config)

    @torch.inference_mode()
    def _run(self, prompts: Prompts, token: int) -> Tensor:
        """Run one row per prompt, and return constants: nothing is to be compared."""
        steps = torch.arange(_TOKENS)[None] + 3 * torch.arange(len(prompts))[:, None]
        self.model((steps * 7 + token) % self.vocab_size)
        return torch.ones(2, len(prompts), 1)


class PlainModel(ServedModel):
    """Any module with linear or embedding layers; only the program that holds it can run it."""

    task = "embed"
    equivalences: tuple[Equivalence, ...] = ()

    def __init__(self, model: nn.Module, lora_config: LoRAConfig) -> None:
        """Wrap the layers of `model` in place; raises `ModelRefused`."""
        self.model = model.eval().requires_grad_(False)
        first = next((p for p in model.parameters() if p.dtype.is_floating_point), None)
        if first is None:
            raise ModelRefused(f"{type(model).__name__} has no floating parameter to adapt")
        self.device: torch.device = first.device
        self.dtype = first.dtype
        self._paths = BasePaths.of(model)
        self.tokenizer = None
        self.image_mapper = ImageMapper(None)
        self.image_part = None
        self.vocab_size = self.max_model_len = 0
        self.media_tokens = frozenset()
        self._warn_about_unused(lora_config)
        self.unwrapped = unwrapped_layers(model)
        table = wrappers_for(lora_config.enable_mixed_moe_lora_format, fully_sharded=False)
        scope = WrapScope(lora_config.target_modules, (*table, *CONVOLUTION_WRAPPERS))
        prepared = prepare_unprobed(model, scope, self.unwrapped)
        self.layers, self.parts, self.image_layers, self.norms, _, self.refusals = prepared
        for layer in self.layers.values():
            if isinstance(layer, VocabParallelEmbeddingWithLoRA):
                # One row of positions serves all sequences.
                layer.is_shared_by_rows = True
        self.shapes = module_shapes(self.layers)


def unwrapped_layers(model: nn.Module) -> dict[str, str]:
    """Return why layers of a model that is taken as it is can't be wrapped, by path."""
    modules = list(model.named_modules())
    uncalled = {child for path, module in modules for child in _unseen(path, module)}
    reasons = dict.fromkeys(sorted(uncalled), "PyTorch computes it from its weights, uncalled")
    return reasons | {path: why for path, module in modules if (why := refusal_of(module))}


def _unseen(path: str, module: nn.Module) -> list[str]:
    """Return the layers below a module that it can compute from their weights, uncalled."""
    if not isinstance(module, nn.TransformerEncoderLayer | nn.MultiheadAttention):
        return []
    return [f"{path}.{name}" if path else name for name, _ in module.named_modules()]
