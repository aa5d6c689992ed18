"""A dummy adapter of every kind of model activates, runs, fills the arena and adds zero."""

import pytest
import torch

from loradock.engine.adapters.in_memory import warmup_rank
from loradock.engine.config import LoRAConfig
from loradock.engine.layers.expert_layout import layout_of
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.manager import LRUCacheLoRAModelManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.dummies import MODELS, RANK_MAX, run_dummy
from tests.support.engine.engine_examples import relative_error
from tests.support.models.expert_examples import SERVED_FAMILIES
from tests.support.models.image_rows import WIDTH, ImageRow, entries, images, inputs
from tests.support.models.image_text_examples import KINDS, build

ERROR_MAX = 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_a_dummy_of_the_highest_rank_fills_the_arena_and_adds_zero(kind: str) -> None:
    has_experts = any(layout_of(module) for module in MODELS[kind]().modules())
    assert has_experts or kind not in SERVED_FAMILIES
    for is_mixed in (False, True)[: 1 + has_experts]:
        config = LoRAConfig(max_lora_rank=RANK_MAX, enable_mixed_moe_lora_format=is_mixed)
        found = run_dummy(MODELS[kind](), config, RANK_MAX)
        assert found["rank"] == RANK_MAX
        assert found["error"] < ERROR_MAX
        assert found["untouched"] == []
        assert found["device_bytes"] == found["room_bytes"]
        assert ("experts" in found["kinds"]) == has_experts
        assert ("head" in found["kinds"]) == kind.startswith("classify")
        assert "embedding" in found["kinds"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_dummy_of_an_image_text_model_is_in_its_tower_too(kind: str) -> None:
    rows = (ImageRow(7, (1,)), ImageRow(0, (0, 2)), ImageRow(7))
    before = build(kind)(**inputs(kind, rows)).logits
    config = LoRAConfig(max_lora_rank=RANK_MAX, enable_tower_connector_lora=True)
    manager = LRUCacheLoRAModelManager(build(kind), 16, 512, 97, config, "cpu")
    dummy = manager.create_dummy_lora(7, RANK_MAX)
    fillable = columns_of_one_adapter(manager.adapter_target.modules.values())
    assert dummy.loras.keys() == {shape.name for shape in fillable}
    manager.add_adapter(dummy)
    manager.activate_adapter(7)
    ids = torch.tensor([row.adapter for row in rows])
    manager.set_adapter_mapping(LoRAMapping(ids.repeat_interleave(WIDTH), ids, is_prefill=True))
    for mapping in manager.image_mappings(entries(kind, rows), images(kind, rows)):
        manager.set_adapter_mapping(mapping)
    assert relative_error(manager.model(**inputs(kind, rows)).logits, before) < ERROR_MAX
    manager.close()


def test_a_warm_up_rank_can_be_divided_among_the_ranks() -> None:
    assert [warmup_rank(rank, 16, 4) for rank in (1, 4, 5, 16)] == [4, 4, 8, 16]
    with pytest.raises(ValueError, match="the next one from 7 is 9, and max_lora_rank is 8"):
        warmup_rank(7, 8, 3)
