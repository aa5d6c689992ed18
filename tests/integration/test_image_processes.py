"""Images end to end: two clients, a controller, an engine, and what `transformers` generates."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from controller.cli.main import app
from controller.client import AsyncClient, Client, Malformed
from controller.log.replay import replay
from controller.shell.default_adapters import DefaultAdapters
from messages.ids import GPU_SLOT
from tests.support.engine.image_bench import NAMES, Row, Yardstick
from tests.support.engine.served import serve
from tests.support.models.image_examples import illustrated, picture, png

KIND = "qwen2_vl"
TOKENS = 10
PATIENCE_S = 60
DEFAULT = {"image": "two"}
DEFAULT_NAME = DefaultAdapters(DEFAULT).by_modality["image"].name

FIRST = (
    Row("one", "a @ cat", (picture(20, 12, 1),)),
    Row("one", "what is this? it is a cat and a dog"),
    Row("one", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    Row(None, "the mat"),
)
SECOND = (
    Row("two", "@ a", (picture(31, 17, 4),)),
    Row("two", "the mat"),
    Row("two", "a @ cat", (picture(20, 12, 1),)),
    Row(None, "a cat and @", (picture(8, 8, 5),)),
)
"""What each of two clients asks at once; the last row runs under the default, which is `two`."""


class Served(NamedTuple):
    """What runs, and what it has to answer to `FIRST` and `SECOND`."""

    directory: Path
    wanted: list[list[int]]


def expected(yardstick: Yardstick) -> list[list[int]]:
    truth = (*FIRST, *SECOND[:-1], SECOND[-1]._replace(adapter=DEFAULT["image"]))
    return [yardstick.greedy(row, TOKENS) for row in truth]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("illustrated")
    directory, model = base / "dir", base / "model"
    wanted = expected(Yardstick(KIND, model))
    options = ("--adapter-root", str(model / "adapters"), "--default-mm-lora", "image=two")
    with serve(directory, "--checked", "--slots", "3", *options, model=model) as process:
        with Client(directory, timeout_s=PATIENCE_S) as client:
            for name in NAMES:
                assert client.activate(name).state == GPU_SLOT
        yield Served(directory, wanted)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, directory.with_suffix(".log").read_text()
    assert replay(directory / "log", checked=True).divergence is None


async def ask(client: AsyncClient, row: Row) -> tuple[list[int], str | None]:
    """A row's tokens as they stream, and the adapter that it ran under."""
    prompt = illustrated(KIND, row.text, *row.images)
    generation = await client.generate(
        prompt.text, row.adapter, images=prompt.images, max_tokens=TOKENS
    )
    tokens = [token async for chunk in generation for token in chunk.tokens]
    assert generation.result is not None
    return tokens, generation.result.adapter


async def ask_all(directory: Path, rows: tuple[Row, ...]) -> list[tuple[list[int], str | None]]:
    async with AsyncClient(directory, timeout_s=PATIENCE_S) as client:
        return await asyncio.gather(*(ask(client, row) for row in rows))


async def both(directory: Path) -> list[tuple[list[int], str | None]]:
    """Two clients' rows, all under way at once."""
    first, second = await asyncio.gather(ask_all(directory, FIRST), ask_all(directory, SECOND))
    return first + second


def test_two_clients_get_what_transformers_generates(served: Served) -> None:
    assert len({tuple(tokens) for tokens in served.wanted}) == len(served.wanted)
    adapters = [row.adapter for row in (*FIRST, *SECOND[:-1])] + [DEFAULT_NAME]
    for _ in range(2):
        answers = asyncio.run(both(served.directory))
        assert answers == list(zip(served.wanted, adapters, strict=True))
        # The second round asks a controller that knows all this from its log alone.
        with Client(served.directory) as client:
            os.kill(client.status().controller_pid, signal.SIGKILL)


def test_files_are_sent_as_they_are(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(png(FIRST[0].images[0]))
    text = illustrated(KIND, FIRST[0].text).text
    with Client(served.directory, timeout_s=PATIENCE_S) as client:
        generation = client.generate(text, "one", images=path, max_tokens=TOKENS)
        assert [token for chunk in generation for token in chunk.tokens] == served.wanted[0]
    options = ["--adapter", "one", "--image", str(path), "--max-tokens", str(TOKENS), "--json"]
    command = ["--dir", str(served.directory), "generate", text, *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    *chunks, _ = map(json.loads, result.stdout.splitlines())
    assert [token for chunk in chunks for token in chunk["tokens"]] == served.wanted[0]


def test_what_the_model_can_not_see_is_refused_and_the_rest_goes_on(served: Served) -> None:
    row = SECOND[0]
    prompt = illustrated(KIND, row.text, *row.images)
    whole = prompt.images[0]
    with Client(served.directory, timeout_s=PATIENCE_S) as client:
        running = client.generate(prompt.text, "two", images=[whole], max_tokens=TOKENS)
        for text, images, told in (
            ("no place for it", [whole], "0 times and the prompt 1 images"),
            (prompt.text, [whole, whole], "1 times and the prompt 2 images"),
            (prompt.text, [b"GIF89a, or so it says"], "image 1 can't be read"),
            (prompt.text, [whole[: len(whole) // 2]], "image 1 can't be read"),
        ):
            with pytest.raises(Malformed, match=told):
                client.generate(text, "two", images=images).text()
        assert [token for chunk in running for token in chunk.tokens] == served.wanted[len(FIRST)]
