"""Generation from images with adapters in tower and connector equals PEFT's."""

from dataclasses import replace
from pathlib import Path

import pytest

from loradock.engine.config import EngineConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.models.loading import load_model
from loradock.engine.punica import MappingType
from loradock.messages.prompts import Sampling
from tests.support.engine.image_bench import (
    EVERY_KIND,
    EVERYWHERE,
    LORA,
    ImageBench,
    PeftReference,
    PromptRow,
)
from tests.support.models.image_examples import picture
from tests.support.models.image_text_examples import build

WITH_TOWERS = replace(LORA, enable_tower_connector_lora=True)
ROWS = (
    PromptRow("one", "a @ cat", (picture(20, 12, 1),)),
    PromptRow(None, "what is this? it is a cat and a dog"),
    PromptRow("two", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    PromptRow(None, "@ a", (picture(31, 17, 4),)),
    PromptRow("one", "a cat and @", (picture(8, 8, 5),)),
)
TEN = Sampling(max_tokens=10)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sequences_with_images_of_several_adapters_equal_peft(kind: str, tmp_path: Path) -> None:
    reference = PeftReference(kind, tmp_path, EVERYWHERE)
    bench = ImageBench(kind, tmp_path, WITH_TOWERS)
    # Gemma 3 projects by a bare parameter.
    parts = {MappingType.TOWER} if kind == "gemma3" else {*MappingType} - {MappingType.LANGUAGE}
    assert parts <= set(bench.model.parts.values())
    driver = bench.driver(max_num_seqs=4)
    ops = [driver.start(row.adapter, bench.prompt(row), TEN) for row in ROWS]
    driver.run()
    for op, row in zip(ops, ROWS, strict=True):
        assert driver.output(op)[0] == reference.greedy(row, 10), row.text


def test_tower_adapters_for_a_model_of_text_only_are_refused(tmp_path: Path) -> None:
    build("llava").save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"enable_tower_connector_lora .* text alone"):
        load_model(EngineConfig(tmp_path), WITH_TOWERS)
