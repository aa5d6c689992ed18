"""The base model, prepared once: loaded, its linear layers wrapped, and proved fit for batches.

What it is: a `transformers` causal language model from a local directory, and one forward pass.
What it is not: generation, or a holder of adapter weights. One rule: what can't be served rightly
is refused when the engine starts, with the reason, and never found out by a request.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.arena import Arena
from engine.config import EngineConfig, LoRAConfig
from engine.errors import ModelRefused
from engine.kv_cache import RowCache, left_padding_mask
from engine.layers import BaseLayerWithLoRA, wrapper_of
from engine.probe import find_unmapped_layers
from engine.punica import PunicaWrapper
from engine.staging import ModuleShape

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

Tokenizer = Any
"""A `transformers` tokenizer; the library brings no types."""


class PreparedModel:
    """A causal language model whose wrapped layers are known by name.

    `layers`: name -> wrapper, in the directory's order. `shapes`: one `ModuleShape` a slice, by
    index. `vocab_size`: the rows of the token embedding. `context_tokens_max`: prompt and output
    of one row together. `eos_ids`: the tokens that end an output. `tokenizer` None: prompts are
    token ids. Raises `ModelRefused` for a model that can't be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        tokenizer: Tokenizer = None,
        context_tokens_max: int = 0,
    ) -> None:
        """Wrap the layers of `model` in place; `context_tokens_max` 0 takes the model's own."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device: torch.device = model.device
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.context_tokens_max = _context_tokens_max(model.config, context_tokens_max)
        self.eos_ids = _eos_ids(model, tokenizer)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        self.layers = wrap_layers(model, lora_config)
        self._unwrap_unmapped(explicit=lora_config.target_modules is not None)
        self.shapes = _shapes(self.layers)

    def _unwrap_unmapped(self, explicit: bool) -> None:
        unmapped = find_unmapped_layers(self.forward, self.layers, self.vocab_size)
        if unmapped and (explicit or len(unmapped) == len(self.layers)):
            raise ModelRefused(
                f"layers {unmapped} do not see every token of a batch in its order, so no adapter "
                "can be applied to them; name others as target_modules"
            )
        _replace(self.model, {self.layers[name]: self.layers[name].base_layer for name in unmapped})
        for name in unmapped:
            del self.layers[name]

    def bind(self, arena: Arena, punica: PunicaWrapper) -> None:
        """Let every wrapped layer read its columns of `arena`, and the batch's mapping."""
        first = 0
        for layer in self.layers.values():
            columns = range(first, first + len(layer.slice_shapes))
            layer.create_lora_weights(arena, columns)
            layer.set_mapping(punica)
            first = columns.stop

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, rows: RowCache) -> Tensor:
        """The logits after each row's last token, [rows, vocabulary]; fills `rows` in place.

        input_ids: [rows, tokens] int64, on any device; a row that brings fewer tokens has padding
        on the left. `rows.lengths` already counts the new tokens.
        """
        tokens = input_ids.shape[1]
        lengths = torch.tensor(rows.lengths, device=self.device)
        arguments: dict[str, Any] = {
            "attention_mask": left_padding_mask(lengths, rows.width + tokens),
            "past_key_values": rows.cache,
            "use_cache": True,
        }
        if "position_ids" in self._accepts:
            places = torch.arange(-tokens, 0, device=self.device)
            arguments["position_ids"] = (lengths[:, None] + places).clamp(min=0)
        if "logits_to_keep" in self._accepts:
            arguments["logits_to_keep"] = 1
        output = self.model(input_ids.to(self.device), **arguments)
        logits: Tensor = output.logits[:, -1]
        return logits


def load_model(config: EngineConfig, lora_config: LoRAConfig) -> PreparedModel:
    """Read `config.model_directory` (safetensors, nothing remote, no foreign code) and prepare it.

    Raises `ModelRefused`.
    """
    # What goes to stderr is for people to read; a bar is drawn over it.
    disable_progress_bar()
    directory = config.model_directory
    if not (directory / "config.json").is_file():
        raise ModelRefused(f"{directory} has no config.json; name a directory of a saved model")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
        ).to(config.torch_device)
        tokenizer = _load_tokenizer(directory)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        raise ModelRefused(
            f"{directory} can't be loaded as a causal language model on {config.device}: {error}"
        ) from error
    return PreparedModel(model, lora_config, tokenizer, config.context_tokens_max)


def wrap_layers(model: PreTrainedModel, lora_config: LoRAConfig) -> dict[str, BaseLayerWithLoRA]:
    """Replace every layer that has a wrapper, but the language-model head, in place.

    A layer that is reachable by several paths is wrapped once, under its first. With
    `target_modules`, only layers that they name are wrapped; a name without a layer raises
    `ModelRefused`.
    """
    head = model.get_output_embeddings()
    candidates = {
        name: (layer, wrapper)
        for name, layer in model.named_modules()
        if layer is not head and (wrapper := wrapper_of(layer)) is not None
    }
    if not candidates:
        raise ModelRefused("the model has no layer of a kind that can be wrapped")
    names = _targeted(candidates, lora_config.target_modules)
    wrapped = {name: candidates[name][1](candidates[name][0]) for name in names}
    _replace(model, {layer.base_layer: layer for layer in wrapped.values()})
    return wrapped


def _targeted(candidates: Collection[str], targets: Sequence[str] | None) -> list[str]:
    if targets is None:
        return list(candidates)
    missing = [t for t in targets if not any(_names(t, name) for name in candidates)]
    if missing:
        suffixes = sorted({name.rpartition(".")[2] for name in candidates})
        raise ModelRefused(
            f"target_modules {missing} name no layer that can be wrapped; "
            f"full names or these suffixes do: {', '.join(suffixes)}"
        )
    return [name for name in candidates if any(_names(t, name) for t in targets)]


def _names(target: str, name: str) -> bool:
    return name == target or name.endswith("." + target)


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value wherever its key is; a layer with several paths keeps them all."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            model.set_submodule(path, replacements[module])


def _shapes(layers: Mapping[str, BaseLayerWithLoRA]) -> tuple[ModuleShape, ...]:
    slices = [(name, shape) for name, layer in layers.items() for shape in layer.slice_shapes]
    return tuple(
        ModuleShape(name, shape.in_features, shape.out_features, index)
        for index, (name, shape) in enumerate(slices)
    )


def _context_tokens_max(config: Any, wanted: int) -> int:
    text_config = config.get_text_config(decoder=True)
    own = getattr(text_config, "max_position_embeddings", 0) or 0
    known = [limit for limit in (own, wanted, *_batch_wide_limits(text_config)) if limit > 0]
    if not known:
        raise ModelRefused(
            "the model's config has no max_position_embeddings; set context_tokens_max"
        )
    return min(known)


def _batch_wide_limits(text_config: Any) -> list[int]:
    """Lengths beyond which one row changes the position encoding of all rows in its batch.

    "longrope" goes over to other frequencies as soon as any row is that long, and what the short
    rows have in the cache was made with the first ones.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    return [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _load_tokenizer(directory: Path) -> Tokenizer:
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
