"""A manager of an image-text model with adapters on all of its parts, and PEFT's same model.

Adapters are made and saved by PEFT, and read by the manager's own reader.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from loradock.engine.adapters import LoRARequest
from loradock.engine.config import LoRAConfig
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import LoRAMapping, MappingType
from tests.support.models.image_rows import WIDTH, ImageRow, entries, images, inputs
from tests.support.models.image_text_examples import build

ALL_PARTS, VISION_ONLY, LANGUAGE_ONLY = 1, 2, 3
NAMES = {ALL_PARTS: "all", VISION_ONLY: "vision", LANGUAGE_ONLY: "language"}
IMAGE_PARTS = (MappingType.TOWER, MappingType.CONNECTOR)
PARTS_OF = {
    ALL_PARTS: (MappingType.LANGUAGE, *IMAGE_PARTS),
    VISION_ONLY: IMAGE_PARTS,
    LANGUAGE_ONLY: (MappingType.LANGUAGE,),
}
RANKS = {ALL_PARTS: 8, VISION_ONLY: 4, LANGUAGE_ONLY: 2}
CONFIG = LoRAConfig(max_lora_rank=8, max_loras=3, enable_tower_connector_lora=True)


def layers_of(kind: str, *parts: MappingType) -> list[str]:
    """Return the full names of the layers of these parts, except the model's ends."""
    model = CausalModel(build(kind), CONFIG)
    ends = (model.model.get_input_embeddings(), model.model.get_output_embeddings())
    part_of = {
        shape.name: model.parts[name]
        for name, layer in model.layers.items()
        for shape in layer.module_shapes(name, 0)
        if layer not in ends and not shape.is_optional
    }
    return [name for name, part in part_of.items() if part in parts]


class PeftReference:
    """The model with every adapter in PEFT, each saved under `root` by its name."""

    def __init__(self, kind: str, root: Path) -> None:
        configs = {
            NAMES[number]: LoraConfig(
                r=RANKS[number],
                lora_alpha=2 * RANKS[number],
                target_modules=layers_of(kind, *parts),
                init_lora_weights=False,
            )
            for number, parts in PARTS_OF.items()
        }
        torch.manual_seed(3)
        first, *rest = configs
        self.kind = kind
        self.model: PeftModel = get_peft_model(build(kind), configs[first], adapter_name=first)
        for name in rest:
            self.model.add_adapter(name, configs[name])
        self.model.eval()
        for config in self.model.peft_config.values():
            # PEFT records that a random start leaves the base weights unchanged.
            config.init_lora_weights = True
        self.model.save_pretrained(root)

    @torch.no_grad()
    def logits(self, row: ImageRow) -> Tensor:
        """Return the logits of a row alone, [tokens, vocabulary]."""
        arguments = inputs(self.kind, [row])
        if row.adapter:
            self.model.set_adapter(NAMES[row.adapter])
            return self.model(**arguments).logits[0]
        with self.model.disable_adapter():
            return self.model(**arguments).logits[0]


class TowersBench:
    """A manager with the saved adapters in its slots."""

    def __init__(self, kind: str, root: Path, config: LoRAConfig = CONFIG) -> None:
        self.kind = kind
        self.manager = LRUCacheLoRAModelManager(build(kind), 16, 512, 97, config, "cpu")
        self.worker = LRUCacheWorkerLoRAManager(self.manager)
        self.requests = [
            LoRARequest(name, number, str(root / name)) for number, name in NAMES.items()
        ]

    def load(self, *numbers: int) -> None:
        for number in numbers:
            self.worker.add_adapter(self.requests[number - 1])

    def map_texts(self, rows: Sequence[ImageRow]) -> None:
        ids = torch.tensor([row.adapter for row in rows])
        mapping = LoRAMapping(ids.repeat_interleave(WIDTH), ids, is_prefill=True)
        self.manager.set_adapter_mapping(mapping)

    def map_images(self, rows: Sequence[ImageRow]) -> None:
        tensors = images(self.kind, rows)
        for mapping in self.manager.image_mappings(entries(self.kind, rows), tensors):
            self.manager.set_adapter_mapping(mapping)

    @torch.inference_mode()
    def logits(self, rows: Sequence[ImageRow]) -> Tensor:
        """Return one batch's logits under the current mappings, [rows, tokens, vocabulary]."""
        logits: Tensor = self.manager.model(**inputs(self.kind, rows)).logits
        return logits
