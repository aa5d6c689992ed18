"""Properties of embeddings, heads, and the copies that PEFT saves with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from loradock.engine.adapters import LoadedAdapter, LoRAModel, PEFTHelper, read_adapter
from loradock.engine.adapters.target import AdapterTarget, BaseParameter
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterConfigRefused, AdapterDoesNotFit, EngineError, NotFinite
from loradock.engine.layout import ModuleKind, ModuleShape, Shard
from loradock.engine.residency.staging import stage
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    MODULES,
    Q,
    V,
    key,
    pair,
    tensors,
    write,
)

EMBED, HEAD, SCORE = "model.embed_tokens", "lm_head", "score"
KINDS = MODULES | {
    EMBED: ModuleShape(EMBED, 50, 16, 3, kind=ModuleKind.EMBEDDING),
    HEAD: ModuleShape(HEAD, 16, 50, 4),
    SCORE: ModuleShape(SCORE, 16, 3, 5, kind=ModuleKind.HEAD),
}
TARGETS = CONFIG | {"target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head"]}
SAVED = CONFIG | {"modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS"}
ones = torch.ones


def embedding(rank: int = 4, vocabulary: int = 50) -> dict[str, torch.Tensor]:
    path = f"base_model.model.{EMBED}.lora_embedding_"
    return {f"{path}A": torch.randn(rank, vocabulary), f"{path}B": torch.randn(16, rank)}


def head(out: int = 50) -> dict[str, torch.Tensor]:
    return {key(HEAD, "A"): torch.randn(4, 16), key(HEAD, "B"): torch.randn(out, 4)}


def copies(rows: int = 50) -> dict[str, torch.Tensor]:
    base = "base_model.model."
    return {f"{base}{name}.base_layer.weight": ones(rows, 16) for name in (EMBED, HEAD)}


def score(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    found = {"weight": torch.randn(3, 16), "bias": torch.randn(3)} | changes
    return {f"base_model.model.score.{k}": t for k, t in found.items() if t is not None}


def load(path: Path, modules: dict[str, ModuleShape] = KINDS, **options: Any) -> LoadedAdapter:
    """Read an adapter for a model whose embedding and head are ones."""
    held = BaseParameter(ones(50, 16), (50, 16))
    target = AdapterTarget(modules, LORA_CONFIG, base_parameter=lambda _module, _field: held)
    return read_adapter(path.name, [path.parent], target, **options)


def test_embeddings_and_heads_are_read_and_staged_as_their_kind(tmp_path: Path) -> None:
    weights = tensors() | embedding() | head() | copies()
    loaded = load(write(tmp_path / "a", TARGETS, weights))
    lora = loaded.model.loras
    assert lora.keys() == {Q, V, EMBED, HEAD}
    assert (lora[EMBED].kind, lora[HEAD].kind) == (ModuleKind.EMBEDDING, ModuleKind.LINEAR)
    assert torch.equal(lora[EMBED].lora_a, weights[f"base_model.model.{EMBED}.lora_embedding_A"])
    blob = stage(loaded.model, list(KINDS.values()), torch.float32)
    start = int(blob.offsets[3])
    table = blob.data[start : start + 200].view(50, 4)
    assert torch.equal(table, lora[EMBED].lora_a.T), "a token's row must be contiguous"


def test_a_head_is_read_whole_with_or_without_a_bias(tmp_path: Path) -> None:
    for name, change in (("with", {}), ("without", {"bias": None})):
        weights = tensors() | score(**change)
        loaded = load(write(tmp_path / name, SAVED, weights))
        found = loaded.model.loras[SCORE]
        assert (found.kind, found.rank, found.scaling) == (ModuleKind.HEAD, 1, 1)
        assert torch.equal(found.lora_a, weights["base_model.model.score.weight"])
        expected = weights.get("base_model.model.score.bias", torch.zeros(3))
        assert torch.equal(found.lora_b, expected[:, None])
        assert loaded.rank == 4
        stage(loaded.model, list(KINDS.values()), torch.float32)
        sharded = KINDS | {SCORE: replace(KINDS[SCORE], shard=Shard())}
        follower = load(tmp_path / name, sharded, is_follower=True).model.loras[SCORE]
        assert torch.equal(follower.lora_a, found.lora_a)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "no B of an embedding": (
        TARGETS,
        pair(Q) | {k: t for k, t in embedding().items() if k.endswith("A")},
        "embed_tokens.lora_embedding_A has no matching lora_B",
    ),
    "another rank": (TARGETS, tensors() | head() | embedding(3), "config specifies rank 4"),
    "another vocabulary": (
        TARGETS,
        tensors() | head() | embedding(4, 52),
        "has 50 inputs and 16 outputs",
    ),
    "another output": (TARGETS, tensors() | embedding() | head(51), "has 16 inputs and 50 outputs"),
    "an embedding as a linear layer": (
        TARGETS,
        tensors() | head() | {key(EMBED, "A"): ones(4, 50), key(EMBED, "B"): ones(16, 4)},
        "by lora_embedding_A and lora_embedding_B",
    ),
    "a linear layer as an embedding": (
        CONFIG,
        pair(V) | {f"{Q}.lora_embedding_{m}": ones(s) for m, s in (("A", (4, 16)), ("B", (16, 4)))},
        "by lora_A and lora_B",
    ),
    "both at once": (
        TARGETS,
        tensors() | head() | embedding() | {key(EMBED, "B"): ones(16, 4)},
        "(another kind than",
    ),
    "additional tokens": (
        TARGETS,
        tensors() | embedding() | head() | copies(52),
        "is [52, 16], this model's [50, 16]; an adapter with additional tokens",
    ),
    "half of the targets": (TARGETS, tensors() | head(), "without a tensor: 'embed_tokens'"),
    "a head of other labels": (SAVED, tensors() | score(weight=ones(2, 16)), "a bias [3]"),
    "a head of another model": (
        SAVED,
        tensors() | score(weight=ones(2, 16), bias=None),
        "a weight [2, 16]; in this model it has 16 inputs and 3 outputs",
    ),
    "a bias alone": (SAVED, tensors() | score(weight=None), "a saved bias but no weight"),
    "a head of three dimensions": (SAVED, tensors() | score(weight=ones(3, 16, 1)), "dimensions"),
    "a head of integers": (SAVED, tensors() | score(weight=ones(3, 16).int()), "floating dtype"),
    "a head outside modules_to_save": (CONFIG, tensors() | score(), "unexpected tensors"),
    "no head": (SAVED, tensors(), "modules_to_save names 'classifier', 'score', but no tensor"),
    "an adapted head": (
        CONFIG | {"target_modules": ["q_proj", "v_proj", "score"]},
        tensors() | {key(SCORE, "A"): ones(4, 16), key(SCORE, "B"): ones(3, 4)},
        "by its whole weight, with modules_to_save naming it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    config, weights, text = REFUSED[name]
    with pytest.raises(AdapterDoesNotFit) as caught:
        load(write(tmp_path / "a", config, weights))
    assert text in str(caught.value)


def test_a_head_is_refused_where_the_model_has_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a", SAVED, tensors() | score())
    with pytest.raises(AdapterDoesNotFit, match="not wrapped in this model: score"):
        load(path, MODULES)


def test_a_heads_values_are_checked(tmp_path: Path) -> None:
    for name in ("weight", "bias"):
        bad = score()
        bad[f"base_model.model.score.{name}"].view(-1)[1] = torch.inf
        with pytest.raises(NotFinite, match=f"score.{name} contains"):
            load(write(tmp_path / name, SAVED, tensors() | bad))


def test_fan_in_fan_out_is_refused_if_it_is_wrong_for_every_layer(tmp_path: Path) -> None:
    transposed = {name: replace(shape, transposed=True) for name, shape in MODULES.items()}
    mixed = KINDS | {Q: transposed[Q]}
    for fan_in_fan_out, modules, is_right in (
        (False, MODULES, True),
        (True, MODULES, False),
        (True, transposed, True),
        (False, transposed, False),
        (True, mixed, True),
        (False, mixed, True),
    ):
        path = write(tmp_path / "a", CONFIG | {"fan_in_fan_out": fan_in_fan_out})
        if is_right:
            assert load(path, modules).model.loras
        else:
            with pytest.raises(AdapterConfigRefused, match="layers need the opposite"):
                load(path, modules)


def test_adapters_of_peft_of_every_kind_are_read_as_in_peft(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        num_labels=3,
    )
    causal = {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "task_type": "CAUSAL_LM"}
    classes = {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    for name, kind, fields in (
        ("causal", LlamaForCausalLM, causal),
        ("classes", LlamaForSequenceClassification, classes),
    ):
        torch.manual_seed(1)
        base = kind(config)
        linear = "model.layers.0.self_attn.q_proj"
        modules = {linear: ModuleShape(linear, 16, 16, 0)}
        modules |= {m: KINDS[m] for m in (EMBED, HEAD, SCORE)}
        peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, **fields))
        peft.save_pretrained(tmp_path / name, save_embedding_layers=False)
        loaded = load(tmp_path / name, modules).model.loras
        again = PeftModel.from_pretrained(kind(config), tmp_path / name)
        layers = dict(again.base_model.model.named_modules())
        for module, lora in loaded.items():
            if lora.kind is ModuleKind.HEAD:
                saved = layers[module].modules_to_save["default"].weight
                assert torch.equal(lora.lora_a, saved)
                continue
            expected = layers[module].get_delta_weight("default")
            delta = lora.scaling * lora.lora_b @ lora.lora_a
            oriented = delta.T if lora.kind is ModuleKind.EMBEDDING else delta
            torch.testing.assert_close(oriented, expected)
        assert len(loaded) == (3 if name == "causal" else 2)


def test_a_model_without_a_head_requires_adapters_with_one(tmp_path: Path) -> None:
    headless = AdapterTarget(KINDS, LORA_CONFIG, requires_head=True)
    with_head = write(tmp_path / "with", SAVED, tensors() | score())
    without = write(tmp_path / "without", CONFIG, tensors())
    assert read_adapter("with", [tmp_path], headless).model.loras[SCORE].kind is ModuleKind.HEAD
    with pytest.raises(AdapterDoesNotFit, match=f"saved without a head and .*: {SCORE}"):
        read_adapter("without", [tmp_path], headless)
    assert {load(path).model.rank for path in (with_head, without)} == {4}


def test_tensors_in_memory_are_checked_against_a_given_model() -> None:
    helper = PEFTHelper.from_dict(SAVED)
    target = AdapterTarget(KINDS, LORA_CONFIG)
    model = LoRAModel.from_lora_tensors(1, tensors() | score(), helper, model=target)
    assert model.loras[SCORE].kind is ModuleKind.HEAD
    narrow = AdapterTarget(KINDS | {Q: ModuleShape(Q, 8, 16, 0)}, LORA_CONFIG)
    for weights, other, text in (
        (tensors() | score(), narrow, "has 8 inputs and 16 outputs"),
        (tensors() | score(), AdapterTarget(MODULES, LORA_CONFIG), "not wrapped"),
        (
            tensors() | score(),
            AdapterTarget(KINDS, LoRAConfig(max_lora_rank=1)),
            "max_lora_rank is 1",
        ),
        (pair(Q) | score(), target, "target_modules without a tensor"),
    ):
        with pytest.raises(EngineError, match=text):
            LoRAModel.from_lora_tensors(1, weights, helper, model=other)
