"""Tiny random models that embed or classify, each with adapters made by PEFT.

Every adapter changes its model's results, and the adapters of one model have different ranks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    EuroBertConfig,
    EuroBertForSequenceClassification,
    EuroBertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

VOCABULARY = 101
PADDING = 1
LABELS = {
    "id2label": {0: "good", 1: "bad", 2: "ugly"},
    "label2id": {"good": 0, "bad": 1, "ugly": 2},
}
TEXTS = ((5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 2, 11), (40,), (50, 51, 52, 53))

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "initializer_range": 0.2,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2}
_MIXTURE = _DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_BERT_TARGETS = ["query", "value", "dense"]
_LLAMA_TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


@dataclass(frozen=True)
class PoolingExample:
    """A model, and the modules that its adapters target."""

    name: str
    make: Callable[[], PreTrainedModel]
    targets: list[str]

    def save(self, directory: Path) -> Path:
        """Save the base model without a tokenizer, so that its texts are token ids."""
        self.make().save_pretrained(directory)
        return directory


def _make(kind: type, config: type, **fields: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        return kind(config(**fields)).eval()

    return make


EMBEDDERS = (
    PoolingExample("bert", _make(BertModel, BertConfig, **_ENCODER), _BERT_TARGETS),
    PoolingExample("roberta", _make(RobertaModel, RobertaConfig, **_ENCODER), _BERT_TARGETS),
    PoolingExample("eurobert", _make(EuroBertModel, EuroBertConfig, **_DECODER), _LLAMA_TARGETS),
    PoolingExample("qwen3", _make(Qwen3Model, Qwen3Config, **_DECODER, head_dim=8), _LLAMA_TARGETS),
    PoolingExample(
        "qwen3-moe",
        _make(Qwen3MoeModel, Qwen3MoeConfig, **_MIXTURE, head_dim=8),
        ["q_proj", "v_proj", "o_proj"],
    ),
)
CLASSIFIERS = (
    PoolingExample(
        "bert",
        _make(BertForSequenceClassification, BertConfig, **_ENCODER, **LABELS),
        _BERT_TARGETS,
    ),
    PoolingExample(
        "roberta",
        _make(RobertaForSequenceClassification, RobertaConfig, **_ENCODER, **LABELS),
        ["query", "value"],
    ),
    PoolingExample(
        "llama",
        _make(LlamaForSequenceClassification, LlamaConfig, **_DECODER, **LABELS),
        _LLAMA_TARGETS,
    ),
    PoolingExample(
        "qwen2",
        _make(Qwen2ForSequenceClassification, Qwen2Config, **_DECODER, **LABELS),
        _LLAMA_TARGETS,
    ),
    PoolingExample(
        "mistral",
        _make(MistralForSequenceClassification, MistralConfig, **_DECODER, **LABELS),
        _LLAMA_TARGETS,
    ),
    PoolingExample(
        "eurobert",
        _make(EuroBertForSequenceClassification, EuroBertConfig, **_DECODER, **LABELS),
        _LLAMA_TARGETS,
    ),
)

ADAPTERS = {"wide": {"r": 8, "lora_alpha": 16}, "narrow": {"r": 2, "lora_alpha": 5}}


def save_adapters(example: PoolingExample, root: Path, **fields: Any) -> dict[str, PeftModel]:
    """Save an adapter of each name under `root`, and return PEFT's models with them."""
    made = {}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        torch.manual_seed(seed + 1)
        common = {"target_modules": example.targets, "init_lora_weights": False}
        options = common | settings | fields
        model = get_peft_model(example.make(), LoraConfig(**options)).eval()
        for copied in (p for n, p in model.named_parameters() if "modules_to_save" in n):
            # As if it had been trained.
            torch.nn.init.normal_(copied)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.save_pretrained(root / name)
        made[name] = model
    return made


def write_sentence_modules(directory: Path, modules: list[str], **pooling: Any) -> Path:
    """Write the files that sentence-transformers saves with a model; return the directory."""
    directory.mkdir(exist_ok=True)
    steps = [
        {
            "idx": index,
            "path": f"{index}_{name}" if index else "",
            "type": name if "." in name else f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(steps))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory
