"""An image-text model with two adapters in its slots, beside PEFT's two models of the same.

What it is: both sides of a parity test with images. What it is not: a test. One rule: PEFT's side
sees one prompt at a time, as the processor gives it, and counts positions by itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache

from engine.adapters import read_adapter
from engine.config import EngineConfig, LoRAConfig
from engine.inference.admission import Slots
from engine.jobs import InlineJobs, Jobs
from engine.models.binding import equip
from engine.models.causal_model import PreparedModel
from engine.models.image_processor import Reading, load_processor
from engine.models.kv_cache import RowCache
from engine.models.loading import load_model
from engine.models.tokenization import prompt_tokens
from engine.models.vision.media import offsets_of
from engine.parallel import SINGLE, ParallelGroup
from engine.punica import LoRAMapping
from engine.residency.staging import stage
from messages.ids import OpId
from messages.requests import Prompt
from tests.support.engine.generator_bench import Driver
from tests.support.models.image_examples import ILLUSTRATED, build_with_processor, illustrated
from tests.support.models.image_text_examples import KINDS as FIRST_KINDS

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
LANGUAGE = rf".*(language_model|text_model)\.layers.*\.({'|'.join(TARGETS)})"
SEEING = ("q_proj", "v_proj", "out_proj", "fc1", "fc2", "qkv", r"attn\.proj", "down_proj")
TOWER = rf".*(vision_tower|vision_model|visual)\..*\.({'|'.join(SEEING)})"
CONNECTOR = r".*(multi_modal_projector\.linear_[12]|modality_projection\.proj|merger\.mlp\.[02])"
EVERYWHERE = f"{LANGUAGE}|{TOWER}|{CONNECTOR}"
"""What adapters target: the language part, or every part of the model."""
NAMES = ("one", "two")
EOS = 2
LORA = LoRAConfig(max_lora_rank=8, max_loras=len(NAMES))


class Row(NamedTuple):
    """An adapter's name (None: the base), a text with an `@` for each image, and the images."""

    adapter: str | None
    text: str
    images: tuple[Image.Image, ...] = ()


class Yardstick:
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

    def inputs(self, row: Row) -> dict[str, Tensor]:
        prompt = illustrated(self.kind, row.text, *row.images)
        images = list(row.images) or None
        return dict(self.processor(text=[prompt.text], images=images, return_tensors="pt"))

    @torch.no_grad()
    def steps(self, row: Row, next_tokens: Sequence[int]) -> list[Tensor]:
        """The logits after the prompt, then after each of `next_tokens`, cached."""
        if row.adapter is None:
            with self.model.disable_adapter():
                return self._steps(row, next_tokens)
        self.model.set_adapter(row.adapter)
        return self._steps(row, next_tokens)

    @torch.no_grad()
    def greedy(self, row: Row, tokens: int) -> list[int]:
        """What `generate` makes of a row alone; the token that ends it is no part of it."""
        self._forget_positions()
        inputs = self.inputs(row)
        fields = {**inputs, "max_new_tokens": tokens, "do_sample": False}
        if row.adapter is None:
            with self.model.disable_adapter():
                found = self.model.generate(**fields)
        else:
            self.model.set_adapter(row.adapter)
            found = self.model.generate(**fields)
        output = found[0, inputs["input_ids"].shape[1] :].tolist()
        return [token for token in output if token != EOS]

    def _forget_positions(self) -> None:
        """Some models remember the last prompt's positions, and take them for the next one's."""
        for module in self.model.modules():
            if hasattr(module, "rope_deltas"):
                module.rope_deltas = None

    def _steps(self, row: Row, next_tokens: Sequence[int]) -> list[Tensor]:
        cache = DynamicCache()
        self._forget_positions()
        inputs: dict[str, Any] = self.inputs(row)
        found = []
        for token in (*next_tokens, None):
            output = self.model(**inputs, past_key_values=cache, use_cache=True)
            found.append(output.logits[0, -1])
            inputs = {"input_ids": torch.tensor([[token or 0]])}
        return found


class Bench:
    """The engine's side: adapter `one` in slot 0, `two` in slot 1."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        config: LoRAConfig = LORA,
        group: ParallelGroup = SINGLE,
    ) -> None:
        self.kind = kind
        model = load_model(EngineConfig(directory, device="cpu"), config, group)
        assert isinstance(model, PreparedModel)
        self.model = model
        self.arena, self.punica, self.config = equip(model, config, 1 << 20)
        for slot, name in enumerate(NAMES):
            loaded = read_adapter(name, [directory / "adapters"], model.side(self.config))
            self.arena.begin_write(slot, 1, stage(loaded.model, model.shapes, torch.float32, False))
            self.arena.finish_write(slot)

    def read(self, row: Row) -> Reading:
        assert self.model.reader is not None, self.model.without_images
        if row.images:
            return self.model.reader.read(illustrated(self.kind, row.text, *row.images))
        return Reading(prompt_tokens(self.model, row.text))

    def driver(self, jobs: Jobs[OpId] | None = None, **fields: Any) -> Driver:
        """A generator for this model."""
        config = EngineConfig(Path(), **fields)
        slots = Slots(self.arena, [1, 2])
        return Driver(self.model, self.punica, slots, config, NAMES, jobs or InlineJobs())

    def prompt(self, row: Row) -> Prompt:
        """What a client sends for a row."""
        return illustrated(self.kind, row.text, *row.images) if row.images else row.text

    @torch.inference_mode()
    def steps(self, rows: Sequence[Row], next_tokens: Sequence[int]) -> list[Tensor]:
        """The logits after each prompt, then after each of `next_tokens`, all rows in one batch."""
        readings = [self.read(row) for row in rows]
        media = [reading.media for reading in readings]
        ids = [0 if row.adapter is None else NAMES.index(row.adapter) + 1 for row in rows]
        width = max(len(reading.tokens) for reading in readings)
        padded = [[0] * (width - len(reading.tokens)) + reading.tokens for reading in readings]
        cache = RowCache([len(reading.tokens) for reading in readings], offsets_of(media))
        index = torch.tensor(ids).repeat_interleave(width)
        self.punica.update_metadata(LoRAMapping(index, ids, is_prefill=True), [1, 2])
        found = [self.model.forward(torch.tensor(padded), cache, media)]
        for token in next_tokens:
            cache.grow(1)
            self.punica.update_metadata(LoRAMapping(ids, ids), [1, 2])
            found.append(self.model.forward(torch.full((len(rows), 1), token), cache))
        return found


EVERY_KIND = tuple(ILLUSTRATED)
KINDS = tuple(FIRST_KINDS)
