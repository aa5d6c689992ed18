"""A batch of images and texts with different adapters answers as PEFT does, row by row."""

from pathlib import Path

import pytest
import torch

from engine.models.vision.media import Media, joined, media_arguments
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.image_bench import EVERY_KIND, Bench, Row, Yardstick
from tests.support.models.image_examples import picture

ROWS = [
    Row("one", "a @ cat", (picture(20, 12, 1),)),
    Row(None, "what is this? it is a cat and a dog"),
    Row("two", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    Row(None, "@ a", (picture(31, 17, 4),)),
    Row("two", "the mat"),
    Row("one", "a cat and @", (picture(8, 8, 5),)),
]
NEXT_TOKENS = (40, 77, 102)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_mixed_batch_is_pefts_rows_one_by_one(kind: str, tmp_path: Path) -> None:
    yardstick = Yardstick(kind, tmp_path)
    bench = Bench(kind, tmp_path)
    found = bench.steps(ROWS, NEXT_TOKENS)
    for place, row in enumerate(ROWS):
        expected = yardstick.steps(row, NEXT_TOKENS)
        for step, wanted in enumerate(expected):
            assert relative_error(found[step][place], wanted) < 1e-5, (row.text, step)
        if row.adapter:
            base = yardstick.steps(row._replace(adapter=None), ())[0]
            assert relative_error(base, expected[0]) > 0.01, row.text
        if row.images:
            dark = row._replace(images=tuple(picture(*i.size, 9) for i in row.images))
            assert relative_error(yardstick.steps(dark, ())[0], expected[0]) > 1e-3, row.text


def test_what_is_smaller_is_filled_with_zeros_at_its_end() -> None:
    small, wide = torch.ones(1, 2, 2), torch.ones(2, 3, 1)
    both = joined([small, wide])
    assert both.shape == (3, 3, 2)
    assert both[0].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert both[1].tolist() == both[2].tolist() == [[1, 0], [1, 0], [1, 0]]
    assert torch.equal(joined([small]), small)


def test_token_types_and_positions_stand_with_their_own_tokens() -> None:
    types = {"token_type_ids": torch.tensor([1, 1, 0])}
    axes = torch.tensor([[0, 0, 1], [0, 1, 2]])
    media = Media({"pixel_values": torch.ones(1, 3)}, types, axes, -1, 1)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    found = media_arguments([None, media], positions)
    assert found["token_type_ids"].tolist() == [[0, 0, 0, 0], [0, 1, 1, 0]]
    assert found["position_ids"][:, 0].tolist() == [[0, 1, 2, 3]] * 2
    assert found["position_ids"][:, 1].tolist() == [[0, 0, 0, 1], [0, 0, 1, 2]]
    assert torch.equal(found["pixel_values"], torch.ones(1, 3))
