"""Images pass a real controller unchanged, and are sent again after a crash.

The engine is a stand-in, so that it can start late; `test_image_processes` has a real one.
"""

import os
from pathlib import Path

import pytest

from loradock.client import Client
from loradock.client.calls import Timing
from loradock.controller.log.replay import replay
from loradock.controller.log.segments import verify
from loradock.messages import commands, records
from loradock.messages.ids import unscoped
from loradock.messages.prompts import IMAGE_BYTES_MAX, IMAGES_BYTES_MAX, MultimodalPrompt
from tests.support.parallel.processes import controller
from tests.support.simulation.shell_examples import RawClient, StandInEngine, eventually, logged
from tests.support.waiting import HANG_S

SOON = Timing(0.1, 0.4)
LONGEST = (bytes(IMAGE_BYTES_MAX),) * (IMAGES_BYTES_MAX // IMAGE_BYTES_MAX)


@pytest.mark.parametrize("images", [(b"\x89PNG",), LONGEST], ids=["small", "longest"])
def test_images_reach_the_engine_and_no_log(directory: Path, images: tuple[bytes, ...]) -> None:
    with (
        controller(directory, checked=True),
        StandInEngine(directory, "e", os.getpid()) as engine,
        Client(directory, timeout_s=HANG_S) as client,
    ):
        generation = client.generate("a text", images=images)
        assert [chunk.text for chunk in generation] == ["ab"]
        [start] = engine.commands_of(commands.StartGeneration)
        assert start.prompt == MultimodalPrompt("a text", images)
    assert verify(directory / "log").corruption is None
    size = sum(file.stat().st_size for file in (directory / "log").glob("*.log"))
    assert size < 10_000
    assert replay(directory / "log").divergence is None


def lost_payloads(directory: Path) -> list[str]:
    lost = [each for each in logged(directory) if isinstance(each, records.PayloadLost)]
    return [unscoped(each.request_id) for each in lost]


def test_images_that_were_lost_with_a_controller_are_sent_again(directory: Path) -> None:
    """The next process starts the logged request before its client sends the images again."""
    images = (bytes(3 << 20), b"\x89PNG")
    with (
        controller(directory, checked=True) as process,
        Client(directory, timeout_s=HANG_S, timing=SOON) as client,
    ):
        generation = client.generate("a text", images=images)
        with RawClient(directory) as other:
            eventually(lambda: other.status().requests == 1, "the request")
        process.kill()
        process.start()
        with StandInEngine(directory, "e", os.getpid()) as engine:
            eventually(lambda: lost_payloads(directory) == [generation.request_id], "the loss")
            assert not engine.commands_of(commands.StartGeneration)
            assert generation.text() == "ab"
            [start] = engine.commands_of(commands.StartGeneration)
            assert start.prompt == MultimodalPrompt("a text", images)
            assert unscoped(start.request_id) == generation.request_id
        assert process.stop() == 0, process.output()
    assert replay(directory / "log", checked=True).divergence is None
