"""A batch of images and texts with different adapters matches PEFT row by row."""

from pathlib import Path

import pytest
import torch

from loradock.engine.models.image_inputs import (
    ImageInputs,
    concatenate_padded,
    image_arguments,
)
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.image_bench import EVERY_KIND, ROWS, ImageBench, PeftReference
from tests.support.models.image_examples import picture

NEXT_TOKENS = (40, 77, 102)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_each_row_of_a_mixed_batch_matches_peft(kind: str, tmp_path: Path) -> None:
    reference = PeftReference(kind, tmp_path)
    bench = ImageBench(kind, tmp_path)
    found = bench.steps(ROWS, NEXT_TOKENS)
    for index, row in enumerate(ROWS):
        expected = reference.steps(row, NEXT_TOKENS)
        for step, wanted in enumerate(expected):
            assert relative_error(found[step][index], wanted) < 1e-5, (row.text, step)
        if row.adapter:
            base = reference.steps(row._replace(adapter=None), ())[0]
            assert relative_error(base, expected[0]) > 0.01, row.text
        if row.images:
            dark = row._replace(images=tuple(picture(*i.size, 9) for i in row.images))
            assert relative_error(reference.steps(dark, ())[0], expected[0]) > 1e-3, row.text


def test_smaller_tensors_are_padded_with_zeros_at_the_end() -> None:
    small, wide = torch.ones(1, 2, 2), torch.ones(2, 3, 1)
    both = concatenate_padded([small, wide])
    assert both.shape == (3, 3, 2)
    assert both[0].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert both[1].tolist() == both[2].tolist() == [[1, 0], [1, 0], [1, 0]]
    assert torch.equal(concatenate_padded([small]), small)


def test_token_types_and_positions_stay_with_their_own_tokens() -> None:
    types = {"token_type_ids": torch.tensor([1, 1, 0])}
    axes = torch.tensor([[0, 0, 1], [0, 1, 2]])
    inputs = ImageInputs({"pixel_values": torch.ones(1, 3)}, types, axes, -1)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    found = image_arguments([None, inputs], positions)
    assert found["token_type_ids"].tolist() == [[0, 0, 0, 0], [0, 1, 1, 0]]
    assert found["position_ids"][:, 0].tolist() == [[0, 1, 2, 3]] * 2
    assert found["position_ids"][:, 1].tolist() == [[0, 0, 0, 1], [0, 0, 1, 2]]
    assert torch.equal(found["pixel_values"], torch.ones(1, 3))


def test_a_digest_covers_everything_that_images_add() -> None:
    def inputs(
        pixel: float = 1.0, kind: int = 1, position: int = 0, shape: tuple[int, ...] = (1, 4)
    ) -> ImageInputs:
        positions = torch.full((3, 2), position)
        pixels = torch.full(shape, pixel)
        return ImageInputs({"pixels": pixels}, {"types": torch.tensor([kind])}, positions, 0)

    changed = [inputs(pixel=2.0), inputs(kind=2), inputs(position=1), inputs(shape=(2, 2))]
    assert len({one.digest for one in (inputs(), *changed)}) == 1 + len(changed)
    assert inputs().digest == inputs().digest
