"""An image-text model with two adapters in its slots, and PEFT's models with the same adapters.

PEFT's model runs one prompt at a time on the processor's output, and counts positions itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.jobs import InlineJobs, Jobs
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_inputs import position_offsets
from loradock.engine.models.image_processor import ProcessedPrompt, load_processor
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.models.library.generation import cache_argument
from loradock.engine.models.loading import load_model
from loradock.engine.models.tokenization import prompt_tokens
from loradock.engine.parallel import SINGLE, ParallelGroup
from loradock.engine.punica import LoRAMapping
from loradock.engine.residency.staging import Blob, stage
from loradock.messages.ids import OpId
from loradock.messages.prompts import Prompt
from tests.support.engine.generation_bench import SchedulerDriver
from tests.support.models.image_examples import (
    IMAGE_MODELS,
    build_with_processor,
    image_prompt,
    picture,
)
from tests.support.models.image_text_examples import KINDS as FIRST_KINDS

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
LANGUAGE = rf".*(language_model|text_model)\.layers.*\.({'|'.join(TARGETS)})"
VISION_TARGETS = ("q_proj", "v_proj", "out_proj", "fc1", "fc2", "qkv", r"attn\.proj", "down_proj")
TOWER = rf".*(vision_tower|vision_model|visual)\..*\.({'|'.join(VISION_TARGETS)})"
CONNECTOR = r".*(multi_modal_projector\.linear_[12]|modality_projection\.proj|merger\.mlp\.[02])"
EVERYWHERE = f"{LANGUAGE}|{TOWER}|{CONNECTOR}"
"""Targets of adapters: the language part, or every part of the model."""
NAMES = ("one", "two")
EOS = 2
LORA = LoRAConfig(max_lora_rank=8, max_loras=len(NAMES))


class PromptRow(NamedTuple):
    """An adapter's name (None: the base model), a text with an `@` per image, and the images."""

    adapter: str | None
    text: str
    images: tuple[Image.Image, ...] = ()


ROWS: Final = (
    PromptRow("one", "a @ cat", (picture(20, 12, 1),)),
    PromptRow(None, "what is this? it is a cat and a dog"),
    PromptRow("two", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    PromptRow(None, "@ a", (picture(31, 17, 4),)),
    PromptRow("two", "the mat"),
    PromptRow("one", "a cat and @", (picture(8, 8, 5),)),
)


class PeftReference:
    """A saved model with both adapters in PEFT, and its own processor."""

    def __init__(
        self, kind: str, directory: Path, targets: str = LANGUAGE, **image_fields: Any
    ) -> None:
        self.kind = kind
        self.whole = build_with_processor(kind, directory, **image_fields)
        torch.manual_seed(5)
        fields = {"target_modules": targets, "init_lora_weights": False}
        first, second = (LoraConfig(r=rank, lora_alpha=9, **fields) for rank in (8, 3))
        whole = AutoModelForImageTextToText.from_pretrained(directory)
        self.model = get_peft_model(whole, first, adapter_name=NAMES[0]).eval()
        self.model.add_adapter(NAMES[1], second)
        self.model.save_pretrained(directory / "adapters", selected_adapters=list(NAMES))
        self.processor = load_processor(directory, self.whole.config)

    def inputs(self, row: PromptRow) -> dict[str, Tensor]:
        prompt = image_prompt(self.kind, row.text, *row.images)
        images = list(row.images) or None
        return dict(self.processor(text=[prompt.text], images=images, return_tensors="pt"))

    @torch.no_grad()
    def steps(self, row: PromptRow, next_tokens: Sequence[int]) -> list[Tensor]:
        """Return the logits after the prompt and after each of `next_tokens`, with a cache."""
        if row.adapter is None:
            with self.model.disable_adapter():
                return self._steps(row, next_tokens)
        self.model.set_adapter(row.adapter)
        return self._steps(row, next_tokens)

    @torch.no_grad()
    def greedy(self, row: PromptRow, tokens: int) -> list[int]:
        """Return what `generate` returns for a row alone, without the token that ends it."""
        self._reset_positions()
        inputs = self.inputs(row)
        fields = {**inputs, "max_new_tokens": tokens, "do_sample": False}
        if row.adapter is None:
            with self.model.disable_adapter():
                sequences = self.model.generate(**fields)
        else:
            self.model.set_adapter(row.adapter)
            sequences = self.model.generate(**fields)
        output = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return [token for token in output if token != EOS]

    @torch.no_grad()
    def prompt_logprobs(self, row: PromptRow) -> Tensor:
        """Return the log-probability of each token of a base row's prompt but the first."""
        self._reset_positions()
        inputs = self.inputs(row)
        with self.model.disable_adapter():
            scores = self.model(**inputs).logits[0, :-1].log_softmax(-1)
        return scores.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]

    def _reset_positions(self) -> None:
        """Clear positions that some models keep from the last prompt and would reuse."""
        for module in self.model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None

    def _steps(self, row: PromptRow, next_tokens: Sequence[int]) -> list[Tensor]:
        cached = {cache_argument(self.model.get_base_model()): DynamicCache(), "use_cache": True}
        self._reset_positions()
        inputs: dict[str, Any] = self.inputs(row)
        found = []
        for token in (*next_tokens, None):
            output = self.model(**inputs, **cached)
            found.append(output.logits[0, -1])
            inputs = {"input_ids": torch.tensor([[token or 0]])}
        return found


class ImageBench:
    """An engine's model: adapter `one` in slot 0, `two` in slot 1."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        config: LoRAConfig = LORA,
        group: ParallelGroup = SINGLE,
    ) -> None:
        self.kind = kind
        model = load_model(EngineConfig(directory, device="cpu"), config, group)
        assert isinstance(model, CausalModel)
        self.model = model
        self.arena, self.punica, self.config = bind_lora(model, config, 1 << 20)
        self.blobs: list[Blob] = []
        for slot, name in enumerate(NAMES):
            loaded = read_adapter(name, [directory / "adapters"], model.adapter_target(self.config))
            self.blobs.append(stage(loaded.model, model.shapes, torch.float32))
            self.arena.begin_write(slot, 1, self.blobs[slot])
            self.arena.finish_write(slot)

    def read(self, row: PromptRow) -> ProcessedPrompt:
        assert self.model.prompt_reader is not None, self.model.no_images_reason
        if row.images:
            return self.model.prompt_reader.read(image_prompt(self.kind, row.text, *row.images))
        return ProcessedPrompt(prompt_tokens(self.model, row.text))

    def driver(self, jobs: Jobs[OpId] | None = None, **fields: Any) -> SchedulerDriver:
        """Return a scheduler of this model."""
        config = EngineConfig(Path(), **fields)
        jobs = jobs or InlineJobs()
        driver = SchedulerDriver(self.model, self.punica, self.arena, [1, 2], config, NAMES, jobs)
        driver.blobs.update(enumerate(self.blobs, 1))
        return driver

    def prompt(self, row: PromptRow) -> Prompt:
        """Return what a client sends for a row."""
        return image_prompt(self.kind, row.text, *row.images) if row.images else row.text

    @torch.inference_mode()
    def steps(self, rows: Sequence[PromptRow], next_tokens: Sequence[int]) -> list[Tensor]:
        """Return one batch's logits after each prompt and after each of `next_tokens`."""
        prompts = [self.read(row) for row in rows]
        images = [prompt.images for prompt in prompts]
        ids = [0 if row.adapter is None else NAMES.index(row.adapter) + 1 for row in rows]
        width = max(len(prompt.tokens) for prompt in prompts)
        padded = [[0] * (width - len(prompt.tokens)) + prompt.tokens for prompt in prompts]
        cache = BatchKVCache([len(prompt.tokens) for prompt in prompts], position_offsets(images))
        index = torch.tensor(ids).repeat_interleave(width)
        self.punica.update_metadata(LoRAMapping(index, ids, is_prefill=True), [1, 2])
        logits = [self.model.forward(torch.tensor(padded), cache, images)]
        for token in next_tokens:
            cache.grow(1)
            self.punica.update_metadata(LoRAMapping(ids, ids), [1, 2])
            logits.append(self.model.forward(torch.full((len(rows), 1), token), cache))
        return logits


EVERY_KIND = tuple(IMAGE_MODELS)
KINDS = tuple(FIRST_KINDS)
