"""Tied embeddings and heads: what PEFT saves with an adapter is served as PEFT computes it."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit, EngineError, NotFinite
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.models.peft_adapters import save_adapter

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
    paths = {module: path for path, module in model.named_modules()}
    embedding, head = (paths[module].rpartition(".")[2] for module in modules)
    return embedding, head


def train(
    directory: Path, model: PreTrainedModel, *, save: Mapping[str, Any] | None = None, **fields: Any
) -> None:
    """Save an adapter with random weights in every trained parameter."""
    normal = partial(nn.init.normal_, std=0.4)
    fields = {"r": 4, "target_modules": "all-linear"} | fields
    save_adapter(deepcopy(model), directory, 1, train=normal, save=save, **fields)


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
            weights[name] = tensor.clone(memory_format=torch.contiguous_format)
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


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ADAPTED = "model.embed_tokens.base_layer.weight"
ORIGINAL = "model.embed_tokens.original_module.weight"


def other_weight(seed: int = 5) -> Tensor:
    return torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(seed)) * 0.4


CHANGED: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "the head, tied": ({}, (HEAD,)),
    "the embedding, tied": ({}, (EMBEDDING,)),
    "both, tied": ({}, (HEAD, EMBEDDING)),
    "an adapted embedding's": ({"target_modules": ["q_proj", "embed_tokens"]}, (ADAPTED,)),
    "the original of a saved embedding, which the head has": (
        {"modules_to_save": ["embed_tokens"]},
        (ORIGINAL,),
    ),
    "the base of trained tokens": (
        {"trainable_token_indices": [39, 5]},
        ("model.embed_tokens.token_adapter.base_layer.weight",),
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_copy_with_other_values_replaces_what_it_is_a_copy_of(case: str, tmp_path: Path) -> None:
    model = base("llama")
    fields, names = CHANGED[case]
    train(tmp_path, model, **fields)
    rewrite(tmp_path, **dict.fromkeys(names, other_weight()))
    assert_as_in_peft(tmp_path, model)


def test_equal_copies_are_ignored_in_the_dtypes_that_trainers_save(tmp_path: Path) -> None:
    """The adapter has no memory for them, whichever of both dtypes is the coarser one."""
    for served in (torch.float32, torch.bfloat16, torch.float16):
        model = deepcopy(base("llama")).to(served)
        for saved in (torch.float32, torch.bfloat16, torch.float16):
            train(tmp_path, model)
            copied = base("llama").lm_head.weight.to(saved)
            rewrite(tmp_path, **{HEAD: copied, EMBEDDING: copied.clone()})
            worker = make_worker(model)
            assert worker.add_adapter(LoRARequest("a", 1, str(tmp_path)))
            loras = worker.manager.get_adapter(1).loras
            assert not any(name.endswith(".saved") for name in loras), (served, saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_other_value_is_enough(dtype: torch.dtype, tmp_path: Path) -> None:
    model = deepcopy(base("llama")).to(dtype)
    train(tmp_path, model)
    copied = model.lm_head.weight.float().clone()
    copied[VOCABULARY - 1, 15] *= 1.05
    rewrite(tmp_path, **{HEAD: copied, EMBEDDING: copied.clone()})
    worker = make_worker(model)
    worker.add_adapter(LoRARequest("a", 1, str(tmp_path)))
    saved = {"lm_head.saved", "model.embed_tokens.saved"}
    loras = worker.manager.get_adapter(1).loras
    assert saved <= loras.keys()
    assert torch.equal(loras["lm_head.saved"].lora_a, copied.to(dtype))


REFUSED: Mapping[str, tuple[dict[str, Any], dict[str, Tensor], type[EngineError], str]] = {
    "a copy with NaN": ({}, {HEAD: torch.full((40, 16), torch.nan)}, NotFinite, HEAD),
    "an unused copy with NaN": (
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {ORIGINAL: torch.full((40, 16), torch.nan)},
        NotFinite,
        "original_module.weight contains NaN",
    ),
    "a copy with more rows": (
        {},
        {HEAD: torch.ones(42, 16)},
        AdapterDoesNotFit,
        r"lm_head.weight is \[42, 16\], this model's \[40, 16\]",
    ),
    "two values of tied weights": (
        {},
        {HEAD: other_weight(), EMBEDDING: other_weight(6)},
        AdapterDoesNotFit,
        "are for one weight and differ",
    ),
    "two values of a saved module": (
        {"modules_to_save": ["lm_head"]},
        {"lm_head.modules_to_save.weight": other_weight()},
        AdapterDoesNotFit,
        "lm_head.modules_to_save.weight .* are for one weight and differ|are for one weight",
    ),
    "two values of modules that are tied by the config": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {HEAD: other_weight()},
        AdapterDoesNotFit,
        "are for one weight and differ",
    ),
    "another base weight of an adapted layer with a scale": (
        {"target_modules": ["q_proj"], "use_dora": True},
        {"model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(16, 16)},
        AdapterDoesNotFit,
        "q_proj.base_layer.weight differs from this model's",
    ),
    "rows of too few tokens": (
        {"trainable_token_indices": [39, 5]},
        {"trainable_tokens_delta": torch.ones(1, 16)},
        AdapterDoesNotFit,
        "one floating row for each of 2 tokens",
    ),
    "rows of another width": (
        {"trainable_token_indices": [39, 5]},
        {"trainable_tokens_delta": torch.ones(2, 15)},
        AdapterDoesNotFit,
        "in this model a row has 16",
    ),
    "rows of tokens and a whole embedding": (
        {"trainable_token_indices": [39, 5]},
        {"model.embed_tokens.modules_to_save.weight": other_weight()},
        AdapterDoesNotFit,
        "trained tokens of modules that are adapted or replaced too",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_can_not_be_served_are_refused_by_name(case: str, tmp_path: Path) -> None:
    model = base("llama")
    fields, changes, error, text = REFUSED[case]
    train(tmp_path, model, **fields)
    rewrite(tmp_path, **changes)
    worker = make_worker(model)
    with pytest.raises(error, match=text):
        worker.add_adapter(LoRARequest("a", 1, str(tmp_path)))
    assert not worker.manager.list_adapters()


def test_copies_are_compared_where_the_head_is_not_wrapped(tmp_path: Path) -> None:
    model = base("llama")
    train(tmp_path, model, target_modules=["q_proj"])
    config = LoRAConfig(max_lora_rank=8, max_loras=1, target_modules=["q_proj"])
    for copied, text in {
        model.lm_head.weight: "",
        torch.ones(42, 16): "is \\[42, 16\\], this model's",
        other_weight(): "lm_head.weight differs from this model's lm_head, which can't be replaced",
    }.items():
        rewrite(tmp_path, **{HEAD: copied})
        manager = LRUCacheLoRAModelManager(deepcopy(model), 8, 256, VOCABULARY, config, "cpu")
        worker = LRUCacheWorkerLoRAManager(manager)
        request = LoRARequest("a", 1, str(tmp_path))
        if text:
            with pytest.raises(AdapterDoesNotFit, match=text):
                worker.add_adapter(request)
        else:
            assert worker.add_adapter(request)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("case", ["both", "embedding", "embedding, tied", "copies", "tokens"])
def test_a_vocabulary_that_was_resized_in_training_is_served(
    case: str, tied: bool, tmp_path: Path
) -> None:
    """The new rows of the base are random on both sides, so they differ from the copies' rows."""
    small = LlamaConfig(**_LLAMA | {"vocab_size": 37}, initializer_range=0.3)
    small.tie_word_embeddings = tied
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "base")
    resized = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
        model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
        resized.append(model.requires_grad_(False))
    assert not torch.equal(*(model.lm_head.weight for model in resized))
    fields, save = fields_of(case, resized[0])
    train(tmp_path / "a", resized[0], save=save, **fields)
    names = load_file(tmp_path / "a/adapter_model.safetensors").keys()
    assert any(
        name.endswith(("original_module.weight", "base_layer.weight")) for name in names
    ) or (case == "copies")
    assert_as_in_peft(tmp_path / "a", resized[1])


def test_names_of_modules_that_the_model_lacks_are_ignored_as_in_peft(tmp_path: Path) -> None:
    model = base("llama")
    train(tmp_path, model, modules_to_save=["score", "wte", "lm_head"])
    assert_as_in_peft(tmp_path, model)
    train(tmp_path, model, modules_to_save=["score", "wte"])
    assert_as_in_peft(tmp_path, model)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text()) | {"modules_to_save": ["wte", "embed_tokens"]}
    path.write_text(json.dumps(config))
    with pytest.raises(AdapterDoesNotFit, match="names 'embed_tokens', but no tensor"):
        make_worker(model).add_adapter(LoRARequest("a", 1, str(tmp_path)))


@pytest.mark.parametrize("case", ["embedding, tied", "copies", "tokens", "tokens of both"])
@torch.no_grad()
def test_adapters_in_memory_are_as_those_of_files(case: str, tmp_path: Path) -> None:
    model = base("llama")
    fields, save = fields_of(case, model)
    train(tmp_path, model, save=save, **fields)
    if case == "copies":
        rewrite(tmp_path, **dict.fromkeys((HEAD, EMBEDDING), other_weight()))
    helper = PEFTHelper.from_local_dir(str(tmp_path))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    manager = make_worker(model).manager
    if case != "embedding, tied":
        with pytest.raises(AdapterDoesNotFit, match="pass model="):
            LoRAModel.from_lora_tensors(1, tensors, helper)
    # Modules with A and B, as `supported_lora_modules` lists them.
    expected_modules = {f"{name}_proj" for name in (*"qkvo", "gate", "up", "down")}
    adapters = [
        LoRAModel.from_lora_tensors(1, tensors, helper, model=manager),
        LoRAModel.from_local_checkpoint(
            str(tmp_path),
            expected_modules,
            helper,
            lora_model_id=2,
            model=manager,
        ),
    ]
    expected = by_peft(tmp_path, model)
    for adapter in adapters:
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        # What the manager returns can be added again.
        again = manager.get_adapter(adapter.id).clone(adapter.id + 10)
        manager.remove_adapter(adapter.id)
        manager.add_adapter(again)
        manager.activate_adapter(again.id)
        manager.set_adapter_mapping(LoRAMapping([again.id] * len(PROMPT), [again.id]))
        found = manager.model(torch.tensor([PROMPT])).logits[0]
        assert relative_error(found, expected) < 1e-5


@torch.no_grad()
def test_a_head_of_any_vocabulary_is_adapted(tmp_path: Path) -> None:
    """Gemma 3 has more than 262,144 tokens."""
    fields = TIED["gemma3_text"] | {"vocab_size": 262_208, "hidden_size": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3_text", **fields, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    # The copy of the head has 8 MB, so it is compared in parts.
    targets = ["q_proj", "lm_head"]
    peft = save_adapter(deepcopy(model), tmp_path, 1, r=4, target_modules=targets)
    manager = LRUCacheLoRAModelManager(
        model, 4, 64, 262_208, LoRAConfig(max_lora_rank=8, max_loras=1), "cpu"
    )
    worker = LRUCacheWorkerLoRAManager(manager)
    prompt = torch.tensor([[3, 262_207, 5]])
    expected = peft(input_ids=prompt).logits
    worker.set_active_adapters(
        [LoRARequest("a", 1, str(tmp_path))], LoRAMapping([1, 1, 1], [1], is_prefill=True)
    )
    assert relative_error(manager.model(prompt).logits, expected) < 1e-5
    assert "lm_head" in manager.get_adapter(1).loras
    assert "lm_head.saved" not in manager.get_adapter(1).loras
