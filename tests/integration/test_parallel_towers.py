"""Two ranks answer to images as one does, with adapters on every part of the model."""

import pytest

from tests.support.models.image_text_examples import KINDS
from tests.support.parallel import towers
from tests.support.parallel.ranks import Ranks

ERROR_MAX = 1e-5


@pytest.mark.parametrize(
    ("kind", "fully_sharded"),
    [*((kind, False) for kind in KINDS), ("llava", True), ("qwen2_5_vl", True)],
)
def test_two_ranks_read_images_as_one(pair: Ranks, kind: str, fully_sharded: bool) -> None:
    for rank in pair.run(towers.same_logits, kind=kind, fully_sharded=fully_sharded):
        assert max(rank["error"], rank["base"]) < ERROR_MAX
        assert rank["tower"] > 0
        assert rank["is_tower_whole"]
        assert rank["is_sharded"] == fully_sharded


def test_a_tower_stays_whole_regardless_of_the_plan(pair: Ranks) -> None:
    found = pair.run(towers.same_logits, kind="llava", fully_sharded=False, is_tower_planned=True)
    for rank in found:
        assert rank["error"] < ERROR_MAX
        assert rank["is_tower_whole"]
