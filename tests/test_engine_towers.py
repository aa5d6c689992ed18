"""Adapters in towers and connectors are PEFT's, image by image in one batch.

A batch mixes the base and three adapters: one on tower, connector and language part at once, one on
tower and connector alone, one on the language part alone; rows with no image, one, and several of
unlike sizes.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from engine.adapters import LoRARequest
from engine.config import LoRAConfig
from engine.layout import ModuleKind
from engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from engine.model import PreparedModel
from engine.punica import LoRAMapping, MappingType
from tests.engine_examples import relative_error
from tests.image_rows import WIDTH, Row, entries, images, inputs
from tests.image_text_examples import KINDS, build

EVERYTHING, SEEING, READING = 1, 2, 3
NAMES = {EVERYTHING: "everything", SEEING: "seeing", READING: "reading"}
ROWS = (
    Row(EVERYTHING, (1,)),
    Row(0, (0, 2)),
    Row(SEEING, (2, 0)),
    Row(READING, (1,)),
    Row(EVERYTHING),
    Row(SEEING, (1,)),
    Row(0),
)
IMAGE_PARTS = (MappingType.TOWER, MappingType.CONNECTOR)
CONFIG = LoRAConfig(max_lora_rank=8, max_loras=3, enable_tower_connector_lora=True)
PARTS_OF = {
    EVERYTHING: {"r": 8, "parts": (MappingType.LANGUAGE, *IMAGE_PARTS)},
    SEEING: {"r": 4, "parts": IMAGE_PARTS},
    READING: {"r": 2, "parts": (MappingType.LANGUAGE,)},
}


def linear_layers(kind: str, *parts: MappingType) -> list[str]:
    """The full names of these parts' linear layers, as PEFT targets them."""
    model = PreparedModel(build(kind), CONFIG)
    head = model.model.get_output_embeddings()
    part_of = {
        shape.name: model.parts[name]
        for name, layer in model.layers.items()
        for shape in layer.module_shapes(name, 0)
        if shape.kind is ModuleKind.LINEAR and layer is not head
    }
    return [name for name, part in part_of.items() if part in parts]


class Peft:
    """The same model with every adapter in peft, saved under `root` by its name."""

    def __init__(self, kind: str, root: Path) -> None:
        configs = {
            NAMES[number]: LoraConfig(
                r=own["r"],
                lora_alpha=2 * own["r"],
                target_modules=linear_layers(kind, *own["parts"]),
                init_lora_weights=False,
            )
            for number, own in PARTS_OF.items()
        }
        torch.manual_seed(3)
        first, *rest = configs
        self.kind = kind
        self.model: PeftModel = get_peft_model(build(kind), configs[first], adapter_name=first)
        for name in rest:
            self.model.add_adapter(name, configs[name])
        self.model.eval()
        for config in self.model.peft_config.values():
            config.init_lora_weights = True
        self.model.save_pretrained(root)

    @torch.no_grad()
    def logits(self, row: Row) -> Tensor:
        given = inputs(self.kind, [row])
        if not row.adapter:
            with self.model.disable_adapter():
                return self.model(**given).logits[0]
        self.model.set_adapter(NAMES[row.adapter])
        return self.model(**given).logits[0]


class Bench:
    """A manager with the saved adapters in its slots."""

    def __init__(self, kind: str, root: Path, config: LoRAConfig = CONFIG) -> None:
        self.kind = kind
        self.manager = LRUCacheLoRAModelManager(build(kind), 16, 512, 97, config, "cpu")
        self.worker = LRUCacheWorkerLoRAManager(self.manager)
        for number in PARTS_OF:
            path = root / NAMES[number]
            self.worker.add_adapter(LoRARequest(path.name, number, str(path)))

    def map_texts(self, rows: tuple[Row, ...]) -> None:
        ids = torch.tensor([row.adapter for row in rows])
        mapping = LoRAMapping(ids.repeat_interleave(WIDTH), ids, is_prefill=True)
        self.manager.set_adapter_mapping(mapping)

    def map_images(self, rows: tuple[Row, ...]) -> None:
        tensors = images(self.kind, rows)
        for mapping in self.manager.image_mappings(entries(self.kind, rows), tensors):
            self.manager.set_adapter_mapping(mapping)

    @torch.inference_mode()
    def logits(self, rows: tuple[Row, ...]) -> Tensor:
        return self.manager.model(**inputs(self.kind, rows)).logits


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_a_batch_with_images_is_pefts(kind: str, tmp_path: Path) -> None:
    peft = Peft(kind, tmp_path)
    bench = Bench(kind, tmp_path)
    bench.map_texts(ROWS)
    bench.map_images(ROWS)
    for row, found in zip(ROWS, bench.logits(ROWS), strict=True):
        expected = peft.logits(row)
        assert relative_error(found, expected) < 1e-5, row
        if row.adapter and (row.images or row.adapter == EVERYTHING):
            base = peft.logits(row._replace(adapter=0))
            assert relative_error(base, expected) > 1e-3, row
