"""What two ranks are asked about image-text models: the same logits as one, with images.

Every case builds a tiny model of a kind from one seed on each rank, prepares it twice (whole, and
split over the ranks), puts the same adapters on tower, connector and language part into both, and
compares a prefill of rows with images and without.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.models.binding import equip
from engine.models.causal_model import PreparedModel
from engine.models.sharding import shard_model
from engine.parallel import ParallelGroup
from engine.punica import LoRAMapping, MappingType
from engine.residency.staging import stage
from tests.support.engine.engine_examples import relative_error
from tests.support.models.image_rows import WIDTH, Row, entries, images, inputs
from tests.support.models.image_text_examples import build
from tests.support.parallel.models import IDS, RANK_MAX, adapter
from tests.support.parallel.ranks import serve

ROWS = (Row(IDS[0], (1,)), Row(0, (0, 2)), Row(IDS[2], (2, 0)), Row(IDS[1]), Row(IDS[1], (1,)))
TOWER_PLAN = {"self_attn.q_proj": "colwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
"""What a plan might say of an encoder's layers."""


class Bench:
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
        self.model = PreparedModel(model, config)
        if group is not None:
            self.model.group = group
        arena, self.punica, _ = equip(self.model, config, 4 << 20)
        by_name = {shape.name: shape for shape in self.model.shapes}
        for slot in range(len(IDS)):
            own = adapter(slot, self.model.shapes).cut(by_name)
            arena.begin_write(slot, 1, stage(own, self.model.shapes, torch.float32, pin=False))
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
    """How far the split model's logits are from the whole one's, and what became of its tower."""
    whole = build(kind)
    split = copy.deepcopy(whole)
    if is_tower_planned:
        layers = "model.vision_tower.encoder.layers.*."
        split.tp_plan = split.tp_plan | {layers + name: way for name, way in TOWER_PLAN.items()}
    shard_model(split, group, torch.device("cpu"))
    bench = Bench(split, fully_sharded, group)
    expected, found = Bench(whole, False).logits(kind), bench.logits(kind)
    base = [row.adapter == 0 for row in ROWS]
    shapes = {
        shape.name: shape
        for name, layer in bench.model.layers.items()
        if bench.model.parts[name] is not MappingType.LANGUAGE
        for shape in layer.module_shapes(name, 0)
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


CASES = {same_logits.__name__: same_logits}

if __name__ == "__main__":
    serve(CASES)
