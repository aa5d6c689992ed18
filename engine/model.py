"""The base model, prepared once: loaded, its layers wrapped, and proved fit for batches.

What it is: a `transformers` causal language model from a local directory, and one forward pass.
What it is not: generation, the choice of layers, or a holder of adapter weights. One rule: what
can't be served rightly is refused when the engine starts, with the reason, and never found out by
a request.
"""

import inspect
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.arena import Arena
from engine.config import EngineConfig, LoRAConfig
from engine.errors import ModelRefused
from engine.kv_cache import RowCache, left_padding_mask
from engine.layers import wrappers_for
from engine.parallel import SINGLE, ParallelGroup
from engine.preparation import module_shapes, prepare_layers
from engine.punica import PunicaWrapper
from engine.sharding import shard_model

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
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.context_tokens_max = _context_tokens_max(model.config, context_tokens_max)
        self.eos_ids = _eos_ids(model, tokenizer)
        self._accepts = frozenset(inspect.signature(model.forward).parameters)
        table = wrappers_for(
            lora_config.enable_mixed_moe_lora_format, lora_config.fully_sharded_loras
        )
        self.layers = prepare_layers(
            model, self.forward, self.vocab_size, lora_config.target_modules, table
        )
        self.shapes = module_shapes(self.layers)

    def bind(self, arena: Arena, punica: PunicaWrapper) -> None:
        """Let every wrapped layer read its columns of `arena`, and the batch's mapping."""
        columns = iter([shape.index for shape in self.shapes])
        for layer in self.layers.values():
            layer.create_lora_weights(arena, list(islice(columns, len(layer.slice_shapes))))
            layer.set_mapping(punica)

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


def load_model(
    config: EngineConfig, lora_config: LoRAConfig, group: ParallelGroup = SINGLE
) -> PreparedModel:
    """Read `config.model_directory` (safetensors, nothing remote, no foreign code) and prepare it.

    Every rank of `group` keeps its part; collective. Raises `ModelRefused`.
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
        )
        if group.is_single:
            model.to(config.torch_device)
        tokenizer = _load_tokenizer(directory)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        raise ModelRefused(
            f"{directory} can't be loaded as a causal language model on {config.device}: {error}"
        ) from error
    if not group.is_single:
        group.wait_for_all()
        shard_model(model, group, config.torch_device)
    return PreparedModel(model, lora_config, tokenizer, config.context_tokens_max)


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
