"""Images end to end: two clients, a controller, an engine, compared with `transformers`."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from loradock.cli.main import app
from loradock.client import AsyncClient, Client, Malformed
from loradock.controller.log.replay import replay
from loradock.controller.server.preloads import DefaultAdapters
from loradock.messages.ids import GPU_SLOT
from tests.support.engine.image_bench import NAMES, PeftReference, PromptRow
from tests.support.engine.serve_process import serve
from tests.support.models.image_examples import image_prompt, picture, png
from tests.support.waiting import HANG_S

KIND = "qwen2_vl"
TOKENS = 10
DEFAULT = {"image": "two"}
DEFAULT_NAME = DefaultAdapters(DEFAULT).by_modality["image"].name

FIRST = (
    PromptRow("one", "a @ cat", (picture(20, 12, 1),)),
    PromptRow("one", "what is this? it is a cat and a dog"),
    PromptRow("one", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    PromptRow(None, "the mat"),
)
SECOND = (
    PromptRow("two", "@ a", (picture(31, 17, 4),)),
    PromptRow("two", "the mat"),
    PromptRow("two", "a @ cat", (picture(20, 12, 1),)),
    PromptRow(None, "a cat and @", (picture(8, 8, 5),)),
)
"""Two clients' concurrent requests; the last row runs under the default adapter, `two`."""


class Served(NamedTuple):
    """A running server's directory, and the tokens expected for `FIRST` and `SECOND`."""

    directory: Path
    expected_tokens: list[list[int]]


def expected(reference: PeftReference) -> list[list[int]]:
    rows_run = (*FIRST, *SECOND[:-1], SECOND[-1]._replace(adapter=DEFAULT["image"]))
    return [reference.greedy(row, TOKENS) for row in rows_run]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("illustrated")
    directory, model = base / "dir", base / "model"
    expected_tokens = expected(PeftReference(KIND, model))
    options = ("--adapter-root", str(model / "adapters"), "--default-mm-lora", "image=two")
    with serve(directory, "--checked", "--slots", "3", *options, model=model) as process:
        with Client(directory, timeout_s=HANG_S) as client:
            for name in NAMES:
                assert client.activate(name).state == GPU_SLOT
        yield Served(directory, expected_tokens)
        process.terminate()
        assert process.wait(HANG_S) == 0, directory.with_suffix(".log").read_text()
    assert replay(directory / "log", checked=True).divergence is None


async def generate_row(client: AsyncClient, row: PromptRow) -> tuple[list[int], str | None]:
    """Return a row's streamed tokens, and the adapter that it ran under."""
    prompt = image_prompt(KIND, row.text, *row.images)
    generation = await client.generate(
        prompt.text, row.adapter, images=prompt.images, max_tokens=TOKENS
    )
    tokens = [token async for chunk in generation for token in chunk.tokens]
    assert generation.result is not None
    return tokens, generation.result.adapter


async def generate_rows(
    directory: Path, rows: tuple[PromptRow, ...]
) -> list[tuple[list[int], str | None]]:
    async with AsyncClient(directory, timeout_s=HANG_S) as client:
        return await asyncio.gather(*(generate_row(client, row) for row in rows))


async def generate_both(directory: Path) -> list[tuple[list[int], str | None]]:
    """Return the results of both clients' rows, all run concurrently."""
    first, second = await asyncio.gather(
        generate_rows(directory, FIRST), generate_rows(directory, SECOND)
    )
    return first + second


def test_two_clients_get_what_transformers_generates(served: Served) -> None:
    assert len({tuple(tokens) for tokens in served.expected_tokens}) == len(served.expected_tokens)
    adapters = [row.adapter for row in (*FIRST, *SECOND[:-1])] + [DEFAULT_NAME]
    for _ in range(2):
        answers = asyncio.run(generate_both(served.directory))
        assert answers == list(zip(served.expected_tokens, adapters, strict=True))
        # The second round requests from a controller that restored this state from its log.
        with Client(served.directory) as client:
            os.kill(client.status().controller_pid, signal.SIGKILL)


def test_files_are_sent_unchanged(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(png(FIRST[0].images[0]))
    text = image_prompt(KIND, FIRST[0].text).text
    with Client(served.directory, timeout_s=HANG_S) as client:
        generation = client.generate(text, "one", images=path, max_tokens=TOKENS)
        assert [token for chunk in generation for token in chunk.tokens] == served.expected_tokens[
            0
        ]
    options = ["--adapter", "one", "--image", str(path), "--max-tokens", str(TOKENS), "--json"]
    command = ["--dir", str(served.directory), "generate", text, *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    *chunks, _ = map(json.loads, result.stdout.splitlines())
    assert [token for chunk in chunks for token in chunk["tokens"]] == served.expected_tokens[0]


def test_unreadable_images_are_refused_and_running_requests_continue(served: Served) -> None:
    row = SECOND[0]
    prompt = image_prompt(KIND, row.text, *row.images)
    whole = prompt.images[0]
    with Client(served.directory, timeout_s=HANG_S) as client:
        running = client.generate(prompt.text, "two", images=[whole], max_tokens=TOKENS)
        for text, images, message in (
            ("no place for it", [whole], "0 times and the prompt 1 images"),
            (prompt.text, [whole, whole], "1 times and the prompt 2 images"),
            (prompt.text, [b"GIF89a, or so it says"], "image 1 can't be read"),
            (prompt.text, [whole[: len(whole) // 2]], "image 1 can't be read"),
        ):
            with pytest.raises(Malformed, match=message):
                client.generate(text, "two", images=images).text()
        assert [token for chunk in running for token in chunk.tokens] == served.expected_tokens[
            len(FIRST)
        ]
