"""Two ranks that share an image-text model generate from images what one rank does."""

from pathlib import Path

import pytest

from loradock.client import Client, Malformed
from tests.support.engine.image_bench import EVERYWHERE, KINDS, NAMES, ROWS, PeftReference
from tests.support.engine.serve_process import serve
from tests.support.models.image_examples import image_prompt
from tests.support.parallel import images
from tests.support.parallel.ranks import Ranks
from tests.support.waiting import HANG_S

TOKENS = 10


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_generate_what_one_generates(pair: Ranks, kind: str, tmp_path: Path) -> None:
    PeftReference(kind, tmp_path)
    for found in pair.run(images.same_output, kind=kind, directory=str(tmp_path)):
        assert found["found"] == found["expected"]
        assert len(found["expected"]) == len(ROWS)
        assert all(found["expected"])
        assert "0 times and the prompt 1 images" in found["failed"]
        assert any(name.startswith("Row") for name in found["kinds"])


def test_an_engine_of_two_ranks_reads_images_with_adapters_on_every_part(tmp_path: Path) -> None:
    kind, model, directory = "qwen2_5_vl", tmp_path / "model", tmp_path / "d"
    reference = PeftReference(kind, model, EVERYWHERE)
    options = ("--adapter-root", str(model / "adapters"), "--max-loras", "2", "--device", "cpu")
    sharded = ("--tensor-parallel-size", "2", "--enable-tower-connector-lora")
    with (
        serve(directory, *options, *sharded, model=model) as process,
        Client(directory, timeout_s=HANG_S) as client,
    ):
        for name in NAMES:
            client.activate(name)
        prompts = [
            image_prompt(kind, row.text, *row.images) if row.images else None for row in ROWS
        ]
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
            assert tokens == reference.greedy(row, TOKENS), row.text
        with pytest.raises(Malformed, match="image 1 can't be read"):
            client.generate(prompts[0].text, images=b"no image").text()
        process.terminate()
        assert process.wait(HANG_S) == 0
