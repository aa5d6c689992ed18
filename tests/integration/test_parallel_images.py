"""Two ranks that hold an image-text model together generate from images what one rank does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.client import Client, Malformed
from tests.support.engine.image_bench import EVERYWHERE, KINDS, NAMES, Yardstick
from tests.support.engine.served import WAIT_S, serve
from tests.support.models.image_examples import illustrated
from tests.support.parallel.images import ROWS
from tests.support.parallel.ranks import Ranks, ranks

TOKENS = 10


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with ranks("tests.support.parallel.images") as started:
        yield started


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_say_what_one_says(pair: Ranks, kind: str, tmp_path: Path) -> None:
    Yardstick(kind, tmp_path)
    for found in pair.run("same_output", kind=kind, directory=str(tmp_path)):
        assert found["found"] == found["expected"]
        assert all(found["expected"][place] for place in range(len(ROWS)))
        assert "0 times and the prompt 1 images" in found["failed"]
        assert any(name.startswith("Row") for name in found["kinds"])


def test_an_engine_of_two_ranks_sees_images_with_adapters_on_every_part(tmp_path: Path) -> None:
    kind, model, directory = "qwen2_5_vl", tmp_path / "model", tmp_path / "d"
    yardstick = Yardstick(kind, model, EVERYWHERE)
    options = ("--adapter-root", str(model / "adapters"), "--slots", "2", "--device", "cpu")
    sharded = ("--tensor-parallel-size", "2", "--enable-tower-connector-lora")
    with (
        serve(directory, *options, *sharded, model=model) as process,
        Client(directory, timeout_s=WAIT_S) as client,
    ):
        for name in NAMES:
            client.activate(name)
        prompts = [illustrated(kind, row.text, *row.images) if row.images else None for row in ROWS]
        running = [
            client.generate(
                prompt.text if prompt else row.text,
                row.adapter,
                images=prompt.images if prompt else (),
                max_tokens=TOKENS,
            )
            for row, prompt in zip(ROWS, prompts, strict=True)
        ]
        for row, generation in zip(ROWS, running, strict=True):
            tokens = [token for chunk in generation for token in chunk.tokens]
            assert tokens == yardstick.greedy(row, TOKENS), row.text
        with pytest.raises(Malformed, match="image 1 can't be read"):
            client.generate(prompts[0].text, images=b"no image").text()
        process.terminate()
        assert process.wait(WAIT_S) == 0
