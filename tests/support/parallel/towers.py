"""Cases for two ranks about image-text models: the same logits as one rank, with images.

Every case builds a tiny model from one seed on each rank, prepares it twice (whole, and split over
the ranks), puts the same adapters on tower, connector and language part into both, and compares a
prefill of rows with images and without.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from loradock.engine.config import LoRAConfig
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica import LoRAMapping, MappingType
from loradock.engine.residency.staging import stage
from tests.support.engine.engine_examples import relative_error
from tests.support.models.image_rows import WIDTH, ImageRow, entries, images, inputs
from tests.support.models.image_text_examples import build
from tests.support.parallel.models import IDS, RANK_MAX, adapter
from tests.support.parallel.sharding import shard_model

ROWS = (
    ImageRow(IDS[0], (1,)),
    ImageRow(0, (0, 2)),
    ImageRow(IDS[2], (2, 0)),
    ImageRow(IDS[1]),
    ImageRow(IDS[1], (1,)),
)
TOWER_PLAN = {"self_attn.q_proj": "colwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
"""A possible plan for an encoder's layers."""


class ShardedTowersBench:
    """A prepared model with an adapter in every slot."""

    def __init__(
        self, model: PreTrainedModel, fully_sharded: bool, group: ParallelGroup | None = None
    ) -> None:
        config = LoRAConfig(
            max_lora_rank=RANK_MAX,
            max_loras=len(IDS),
            fully_sharded_loras=fully_sharded,
            enable_tower_connector_lora=True,
        )
        self.model = CausalModel(model, config)
        if group is not None:
            self.model.group = group
        arena, self.punica, _ = bind_lora(self.model, config, 4 << 20)
        by_name = {shape.name: shape for shape in self.model.shapes}
        for slot in range(len(IDS)):
            shapes = columns_of_one_adapter(self.model.shapes)
            part = adapter(slot, shapes).sharded(by_name)
            arena.begin_write(slot, 1, stage(part, self.model.shapes, torch.float32))
            arena.finish_write(slot)

    @torch.inference_mode()
    def logits(self, kind: str) -> Tensor:
        ids = torch.tensor([row.adapter for row in ROWS])
        self.punica.update_metadata(LoRAMapping(ids.repeat_interleave(WIDTH), ids, True), IDS)
        mapper = self.model.image_mapper
        for mapping in mapper.mappings(entries(kind, ROWS), images(kind, ROWS)):
            mapper.punicas[mapping.type].update_metadata(mapping, IDS)
        logits: Tensor = self.model.model(**inputs(kind, ROWS)).logits
        return logits


def same_logits(
    group: ParallelGroup, kind: str, fully_sharded: bool, is_tower_planned: bool = False
) -> dict[str, Any]:
    """Return the distance of the split model's logits from the whole's, and facts of its tower."""
    whole = build(kind)
    split = copy.deepcopy(whole)
    if is_tower_planned:
        layers = "model.vision_tower.encoder.layers.*."
        split.tp_plan = split.tp_plan | {layers + name: style for name, style in TOWER_PLAN.items()}
    shard_model(split, group, torch.device("cpu"))
    bench = ShardedTowersBench(split, fully_sharded, group)
    expected, found = ShardedTowersBench(whole, False).logits(kind), bench.logits(kind)
    base = [row.adapter == 0 for row in ROWS]
    shapes = {
        shape.name: shape
        for name, layer in bench.model.layers.items()
        if bench.model.parts[name] is not MappingType.LANGUAGE
        for shape in columns_of_one_adapter(layer.module_shapes(name, 0))
    }
    return {
        "error": relative_error(found, expected),
        "base": relative_error(found[base], expected[base]),
        "tower": len(shapes),
        "is_tower_whole": all(
            shape.b_shape(2)[0] == shape.out_features for shape in shapes.values()
        ),
        "is_sharded": any("Sharded" in type(one).__name__ for one in bench.model.layers.values()),
    }
