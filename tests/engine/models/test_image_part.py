"""Adapters in towers and connectors match PEFT, image by image in one batch.

A batch mixes the base and three adapters: one on tower, connector and language part, one on tower
and connector, one on the language part. Rows have no image, one, or several of different sizes.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from transformers import AutoConfig, AutoModelForCausalLM

from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit, NotResident
from loradock.engine.layout import columns_of_one_adapter
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.towers_bench import (
    ALL_PARTS,
    IMAGE_PARTS,
    LANGUAGE_ONLY,
    VISION_ONLY,
    PeftReference,
    TowersBench,
)
from tests.support.models.image_rows import ImageRow
from tests.support.models.image_text_examples import KINDS, MORE_KINDS, TEXT

ROWS = (
    ImageRow(ALL_PARTS, (1,)),
    ImageRow(0, (0, 2)),
    ImageRow(VISION_ONLY, (2, 0)),
    ImageRow(LANGUAGE_ONLY, (1,)),
    ImageRow(ALL_PARTS),
    ImageRow(VISION_ONLY, (1,)),
    ImageRow(0),
)
KIND = "llava"
PIXELS = torch.ones(1, 3, 8, 8)


@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_every_row_of_a_batch_with_images_matches_peft(kind: str, tmp_path: Path) -> None:
    peft, bench = PeftReference(kind, tmp_path), TowersBench(kind, tmp_path)
    bench.load(ALL_PARTS, VISION_ONLY, LANGUAGE_ONLY)
    bench.map_texts(ROWS)
    bench.map_images(ROWS)
    for row, found in zip(ROWS, bench.logits(ROWS), strict=True):
        expected = peft.logits(row)
        assert relative_error(found, expected) < 1e-5, row
        if row.adapter and (row.images or row.adapter == ALL_PARTS):
            base = peft.logits(row._replace(adapter=0))
            assert relative_error(base, expected) > 1e-3, row


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> tuple[PeftReference, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return PeftReference(KIND, root), root


@pytest.fixture
def bench(peft: tuple[PeftReference, Path]) -> TowersBench:
    """Return a manager with slots for two of the three adapters."""
    config = LoRAConfig(max_lora_rank=8, max_loras=2, enable_tower_connector_lora=True)
    return TowersBench(KIND, peft[1], config)


def test_without_a_mapping_images_use_the_base_model(
    peft: tuple[PeftReference, Path], bench: TowersBench
) -> None:
    bench.load(ALL_PARTS)
    rows = [ImageRow(ALL_PARTS, (1,))]
    base = peft[0].logits(ImageRow(0, (1,)))
    assert relative_error(bench.logits(rows)[0], base) < 1e-5
    bench.map_images(rows)
    assert relative_error(bench.logits(rows)[0], base) > 1e-3
    for part in IMAGE_PARTS:
        bench.manager.set_adapter_mapping(LoRAMapping([], [], type=part))
    assert relative_error(bench.logits(rows)[0], base) < 1e-5


def test_each_part_follows_its_own_mapping(bench: TowersBench) -> None:
    bench.load(ALL_PARTS)
    rows = [ImageRow(ALL_PARTS, (1,))]
    found = [bench.logits(rows)]
    for mapping in bench.manager.image_mappings([ALL_PARTS], {"pixel_values": PIXELS}):
        bench.manager.set_adapter_mapping(mapping)
        found.append(bench.logits(rows))
    bench.map_texts(rows)
    found.append(bench.logits(rows))
    for one, other in pairwise(found):
        assert relative_error(one, other) > 1e-3


def test_a_mapping_of_other_images_fails_the_forward(bench: TowersBench) -> None:
    bench.load(ALL_PARTS)
    bench.map_images([ImageRow(ALL_PARTS, (1,))])
    with pytest.raises(ValueError, match=r"2 units .* mapping of 1"):
        bench.logits([ImageRow(ALL_PARTS, (1, 2))])


def test_a_mapping_without_its_slots_fails_images_and_no_text(
    peft: tuple[PeftReference, Path], bench: TowersBench
) -> None:
    rows, text = [ImageRow(VISION_ONLY, (1,))], ImageRow(0)
    bench.load(VISION_ONLY)
    bench.map_images(rows)
    bench.manager.deactivate_adapter(VISION_ONLY)
    with pytest.raises(NotResident, match="set another mapping"):
        bench.logits(rows)
    assert relative_error(bench.logits([text])[0], peft[0].logits(text)) < 1e-5
    bench.load(LANGUAGE_ONLY, VISION_ONLY)
    expected = peft[0].logits(rows[0])
    assert relative_error(bench.logits(rows)[0], expected) < 1e-5, "it follows its adapter"


def test_a_mapping_may_name_rows_one_by_one(
    peft: tuple[PeftReference, Path], bench: TowersBench
) -> None:
    """LLaVA's encoder has one more row per image than its connector: the class token."""
    bench.load(VISION_ONLY)
    rows = [ImageRow(0, (0,)), ImageRow(VISION_ONLY, (1,))]
    for part, count in zip(IMAGE_PARTS, (5, 4), strict=True):
        ids = [0] * count + [VISION_ONLY] * count
        bench.manager.set_adapter_mapping(LoRAMapping(ids, [0, VISION_ONLY], True, part))
    for row, found in zip(rows, bench.logits(rows), strict=True):
        assert relative_error(found, peft[0].logits(row)) < 1e-5


def test_a_dummy_covers_every_part_and_changes_nothing(bench: TowersBench) -> None:
    manager = bench.manager
    dummy = manager.create_dummy_lora(7, 8)
    fillable = columns_of_one_adapter(manager.adapter_target.modules.values())
    assert dummy.loras.keys() == {shape.name for shape in fillable}
    assert any("vision_tower" in name for name in dummy.loras)
    assert any("projector" in name for name in dummy.loras)
    rows = [ImageRow(7, (1,)), ImageRow(0, (2,))]
    base = bench.logits(rows)
    manager.add_adapter(dummy)
    manager.activate_adapter(7)
    bench.map_texts(rows)
    bench.map_images(rows)
    assert torch.equal(bench.logits(rows), base)


def test_without_the_option_adapters_of_tower_or_connector_are_refused(
    peft: tuple[PeftReference, Path], bench: TowersBench
) -> None:
    plain = TowersBench(KIND, peft[1], LoRAConfig(max_lora_rank=8))
    for number in (ALL_PARTS, VISION_ONLY):
        with pytest.raises(
            AdapterDoesNotFit, match=r"enable_tower_connector_lora: model\."
        ) as refusal:
            plain.load(number)
        assert "language_model" not in str(refusal.value)
    plain.load(LANGUAGE_ONLY)
    bench.load(VISION_ONLY)
    adapter = bench.manager.get_adapter(VISION_ONLY)
    assert isinstance(adapter, LoRAModel)
    with pytest.raises(AdapterDoesNotFit, match=r"tower or the connector.*enable_tower_connector_"):
        plain.manager.add_adapter(adapter.clone(9))
    assert plain.manager.image_mappings([0], {"pixel_values": PIXELS}) == []
    for part in IMAGE_PARTS:
        with pytest.raises(ValueError, match=f"{part.value}.*enable_tower_connector_lora"):
            plain.manager.set_adapter_mapping(LoRAMapping([], [], type=part))


def test_the_default_adapter_of_a_modality_is_requested(
    peft: tuple[PeftReference, Path],
) -> None:
    path = str(peft[1] / "all")
    bench = TowersBench(
        KIND, peft[1], LoRAConfig(max_lora_rank=8, default_mm_loras={"image": path})
    )
    request = bench.worker.default_request({"image"}, 5)
    assert request is not None
    assert (request.lora_int_id, request.lora_path) == (5, path)
    assert bench.worker.default_request((), 5) is None


def test_a_text_adapter_may_name_layers_of_towers(bench: TowersBench, tmp_path: Path) -> None:
    """PEFT accepts targets that a model lacks; a tower's layers of that name stay untouched."""
    config = AutoConfig.for_model(**TEXT, **KINDS[KIND][0])
    named = LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_config(config), named).save_pretrained(tmp_path)
    bench.worker.add_adapter(LoRARequest("text", 9, str(tmp_path)))
    adapter = bench.manager.get_adapter(9)
    assert adapter is not None
    assert all("language_model" in name for name in adapter.loras)


def test_half_an_adapter_of_a_tower_is_refused(
    peft: tuple[PeftReference, Path], bench: TowersBench
) -> None:
    found = {
        path.name: path.read_bytes() for path in (peft[1] / "vision").iterdir() if path.is_file()
    }
    tensors = load(found["adapter_model.safetensors"])
    half = {name: tensor for name, tensor in tensors.items() if ".fc1." not in name}
    helper = PEFTHelper.from_dict(json.loads(found["adapter_config.json"]))
    with pytest.raises(AdapterDoesNotFit, match=r"without a tensor: .*fc1"):
        LoRAModel.from_lora_tensors(9, half, helper, model=bench.manager.adapter_target)
