"""Tied embeddings and heads: what PEFT saves with an adapter is served as PEFT computes it."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.adapters import LoRAModel, LoRARequest, PEFTHelper
from engine.config import LoRAConfig
from engine.errors import AdapterDoesNotFit, EngineError, NotFinite
from engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error

torch.set_num_threads(1)
VOCABULARY = 40
PROMPT = (3, 1, 4, 1, 5, 39, 38)
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1}
_HEADS = {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
_LLAMA = _SIZES | _HEADS | {"num_key_value_heads": 1}
_HEAD_DIM = _LLAMA | {"head_dim": 8}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
TIED: Mapping[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _HEAD_DIM,
    "gemma": _HEAD_DIM,
    "gemma2": _HEAD_DIM,
    "gemma3_text": _HEAD_DIM,
    "gpt2": _GPT2,
    "gpt_neo": _SIZES
    | {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    | {"max_position_embeddings": 32},
    "opt": _SIZES | {"ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2},
    "falcon": _SIZES | {"num_attention_heads": 2},
    "cohere": _LLAMA,
    "starcoder2": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "phi": _SIZES | _HEADS,
}
"""The configs of tied models by type; a head of `phi` has a bias."""


@cache
def base(kind: str) -> PreTrainedModel:
    """Return a tiny tied model; no test changes it."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    fields = TIED[kind] | {"tie_word_embeddings": True, "initializer_range": 0.3} | ids
    config = AutoConfig.for_model(kind, **fields)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def ends(model: PreTrainedModel) -> tuple[str, str]:
    """Return the last names of the token embedding and of the head."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    paths = dict((module, path) for path, module in model.named_modules())
    embedding, head = (paths[module].rpartition(".")[2] for module in modules)
    return embedding, head


def train(
    directory: Path, model: PreTrainedModel, *, save: Mapping[str, Any] | None = None, **fields: Any
) -> None:
    """Save an adapter with random weights in every trained parameter."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, init_lora_weights=False, **{"target_modules": "all-linear"} | fields)
    peft = get_peft_model(deepcopy(model), config)
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad and "lora_" not in name:
            nn.init.normal_(parameter, std=0.4)
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(directory, **save or {})


def by_peft(directory: Path, model: PreTrainedModel) -> Tensor:
    """Return the logits of PEFT with a saved adapter."""
    peft = PeftModel.from_pretrained(deepcopy(model), directory).eval()
    with torch.no_grad():
        return peft(input_ids=torch.tensor([PROMPT])).logits[0]


def make_worker(model: PreTrainedModel) -> LRUCacheWorkerLoRAManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3)
    manager = LRUCacheLoRAModelManager(
        deepcopy(model), 8, 256, VOCABULARY, config, "cpu", device_bytes_max=1 << 20, checked=True
    )
    return LRUCacheWorkerLoRAManager(manager)


@torch.no_grad()
def assert_as_in_peft(directory: Path, model: PreTrainedModel) -> LRUCacheWorkerLoRAManager:
    """Compare an adapter's rows with PEFT's, next to rows of the base model in one batch."""
    expected = {1: by_peft(directory, model)}
    expected[0] = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert relative_error(expected[0], expected[1]) > 1e-2, "the adapter changes nothing"
    worker, rows = make_worker(model), (1, 0, 1)
    index = [row for row in rows for _ in PROMPT]
    request = LoRARequest("a", 1, str(directory))
    worker.set_active_adapters([request], LoRAMapping(index, rows, is_prefill=True))
    found = worker.manager.model(torch.tensor([PROMPT] * len(rows))).logits
    for at, row in enumerate(rows):
        assert relative_error(found[at], expected[row]) < 1e-5, row
    return worker


def rewrite(directory: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a saved adapter by the ends of their names; None removes one."""
    path = directory / "adapter_model.safetensors"
    weights = load_file(path)
    for end, tensor in changes.items():
        name = next((one for one in weights if one.endswith(end)), f"base_model.model.{end}")
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor.contiguous()
    save_file(weights, path)


SAVED: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "embedding": ({"modules_to_save": ["E"]}, {}),
    "head": ({"modules_to_save": ["H"]}, {}),
    "both": ({"modules_to_save": ["E", "H"]}, {}),
    "embedding, tied": ({"modules_to_save": ["E"], "ensure_weight_tying": True}, {}),
    "head, tied": ({"modules_to_save": ["H"], "ensure_weight_tying": True}, {}),
    "both, tied": ({"modules_to_save": ["E", "H"], "ensure_weight_tying": True}, {}),
    "embedding, all forms": ({"modules_to_save": ["E"]}, {"save_embedding_layers": True}),
    "tied, all forms": (
        {"modules_to_save": ["E"], "ensure_weight_tying": True},
        {"save_embedding_layers": True},
    ),
    "copies": ({}, {"save_embedding_layers": True}),
    "adapted embedding": ({"target_modules": ["E"]}, {}),
    "adapted, tied": ({"target_modules": ["E"], "ensure_weight_tying": True}, {}),
    "tokens": ({"trainable_token_indices": [39, 5]}, {}),
    "tokens of the embedding": ({"trainable_token_indices": {"E": [39, 5]}}, {}),
    "tokens of the head": ({"trainable_token_indices": {"H": [39, 5]}}, {}),
    "tokens of both": ({"trainable_token_indices": {"E": [39, 5], "H": [39, 5]}}, {}),
    "other tokens": ({"trainable_token_indices": {"E": [39, 5], "H": [7]}}, {}),
    "tokens, all forms": (
        {"trainable_token_indices": [39, 5]},
        {"save_embedding_layers": True},
    ),
}


def fields_of(case: str, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a case's fields with the model's own names."""
    embedding, head = ends(model)
    fields, save = SAVED[case]
    text = json.dumps(fields).replace('"E"', f'"{embedding}"').replace('"H"', f'"{head}"')
    return json.loads(text), save


@pytest.mark.parametrize("case", SAVED)
@pytest.mark.parametrize("kind", TIED)
def test_what_peft_saves_of_tied_modules_is_served(kind: str, case: str, tmp_path: Path) -> None:
    model = base(kind)
    fields, save = fields_of(case, model)
    train(tmp_path, model, save=save, **fields)
    assert_as_in_peft(tmp_path, model)
