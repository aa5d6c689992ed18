"""Two ranks that hold an image-text model together generate from images what one rank does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.illustrated_bench import KINDS, Yardstick
from tests.parallel_images import ROWS
from tests.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with ranks("tests.parallel_images") as started:
        yield started


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_say_what_one_says(pair: Ranks, kind: str, tmp_path: Path) -> None:
    Yardstick(kind, tmp_path)
    for found in pair.run("same_output", kind=kind, directory=str(tmp_path)):
        assert found["found"] == found["expected"]
        assert all(found["expected"][place] for place in range(len(ROWS)))
        assert "0 times and the prompt 1 images" in found["failed"]
        assert any(name.startswith("Row") for name in found["kinds"])
