"""Image-text models generate from text alone, with adapters on their language part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit, Malformed, ModelRefused
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.models.loading import load_model
from loradock.engine.models.tokenization import prompt_tokens
from loradock.engine.punica import LoRAMapping
from loradock.engine.residency.staging import stage
from tests.support.engine.engine_examples import relative_error
from tests.support.models.image_text_examples import IMAGE_TOKEN, KINDS, TEXT, build

PROMPTS = ((5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 11), (40,))
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
LANGUAGE = rf".*(language_model|text_model)\.layers.*\.({'|'.join(TARGETS)})"
NAMES = ("whole", "text")


def save_adapter(root: Path, name: str, model: PreTrainedModel, **fields: Any) -> PeftModel:
    torch.manual_seed(len(name))
    model_with_adapter = get_peft_model(model, LoraConfig(init_lora_weights=False, **fields)).eval()
    model_with_adapter.save_pretrained(root / name)
    return model_with_adapter


def trained_on_text_alone(kind: str, root: Path) -> PeftModel:
    """Save an adapter of the text model; return the image-text model with the same deltas."""
    whole = build(kind)
    text = {"model_type": "qwen2", **TEXT, **KINDS[kind][0]}
    text.pop("rope_parameters", None)
    alone = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text)).eval()
    fields = {"r": 4, "lora_alpha": 6}
    tuned = save_adapter(root, "text", alone, target_modules=TARGETS, **fields)
    reference = get_peft_model(
        whole, LoraConfig(target_modules=LANGUAGE, init_lora_weights=False, **fields)
    ).eval()
    deltas = {
        name.rpartition("layers.")[2]: weight
        for name, weight in tuned.state_dict().items()
        if "lora_" in name
    }
    for name, weight in reference.named_parameters():
        if "lora_" in name:
            weight.data.copy_(deltas[name.rpartition("layers.")[2]])
    return reference


class ImageTextBench:
    """An image-text model with an adapter of its own in slot 0 and a text model's in slot 1."""

    def __init__(self, kind: str, root: Path) -> None:
        self.references: dict[str | None, Callable[..., Any]] = {
            None: build(kind),
            "whole": save_adapter(
                root, "whole", build(kind), target_modules=LANGUAGE, r=8, lora_alpha=16
            ),
            "text": trained_on_text_alone(kind, root),
        }
        self.model = CausalModel(build(kind), LoRAConfig(max_lora_rank=8, max_loras=2))
        config = LoRAConfig(max_lora_rank=8, max_loras=2)
        arena, self.punica, self.config = bind_lora(self.model, config, 1 << 20)
        for slot, name in enumerate(NAMES):
            blob = stage(self.read(root, name), self.model.shapes, torch.float32)
            arena.begin_write(slot, 1, blob)
            arena.finish_write(slot)

    def read(self, root: Path, name: str) -> Any:
        return read_adapter(name, [root], self.model.adapter_target(self.config)).model

    def logits(self, rows: list[tuple[str | None, tuple[int, ...]]]) -> Tensor:
        width = max(len(prompt) for _, prompt in rows)
        ids = [0 if name is None else NAMES.index(name) + 1 for name, _ in rows]
        padded = torch.tensor([[0] * (width - len(p)) + list(p) for _, p in rows])
        index = torch.tensor(ids).repeat_interleave(width)
        self.punica.update_metadata(LoRAMapping(index, ids, is_prefill=True), [1, 2])
        return self.model.forward(padded, BatchKVCache([len(p) for _, p in rows]))

    @torch.no_grad()
    def expected(self, name: str | None, prompt: tuple[int, ...]) -> Tensor:
        output = self.references[name](input_ids=torch.tensor([prompt]))
        logits: Tensor = output.logits[0, -1]
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_the_language_part_match_peft(kind: str, tmp_path: Path) -> None:
    bench = ImageTextBench(kind, tmp_path)
    rows = [(name, prompt) for prompt in PROMPTS for name in (None, *NAMES)]
    for row, found in zip(rows, bench.logits(rows), strict=True):
        expected = bench.expected(*row)
        assert relative_error(found, expected) < 1e-5, row
        if row[0] is not None:
            assert relative_error(bench.expected(None, row[1]), expected) > 0.01, row


def test_an_adapter_that_touches_the_tower_is_refused(tmp_path: Path) -> None:
    bench = ImageTextBench("llava", tmp_path)
    save_adapter(tmp_path, "tower", build("llava"), target_modules=["q_proj", "fc1"], r=2)
    with pytest.raises(AdapterDoesNotFit, match=r"enable_tower_connector_lora.*fc1"):
        bench.read(tmp_path, "tower")


@pytest.mark.parametrize(
    ("modality", "words"), [("image", "preprocessor_config"), ("audio", "'audio'")]
)
def test_default_adapters_for_an_absent_modality_stop_the_start(
    tmp_path: Path, modality: str, words: str
) -> None:
    build("llava").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=rf"default_mm_loras.*{words}"):
        load_model(EngineConfig(tmp_path), LoRAConfig(default_mm_loras={modality: "a"}))


def test_a_saved_image_text_model_generates_from_text_alone(tmp_path: Path) -> None:
    build("qwen2_vl").save_pretrained(tmp_path)
    model = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert model.task == "generate"
    assert prompt_tokens(model, (5, 6)) == [5, 6]
    with pytest.raises(Malformed, match=f"token {IMAGE_TOKEN} .* image"):
        prompt_tokens(model, (5, IMAGE_TOKEN))
