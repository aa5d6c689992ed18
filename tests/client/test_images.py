"""Tests of prompts with images: their bounds, and how often their frames are sent."""

import asyncio

import pytest

from loradock.client import AsyncClient, Client, Malformed
from loradock.client.arguments import with_images
from loradock.messages import requests as rq
from loradock.messages.prompts import (
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    MultimodalPrompt,
    Sampling,
)
from loradock.messages.wire import FRAME_BYTES_MAX, REQUESTS
from tests.support.simulation.client_examples import TIMING, sent, session, stream
from tests.support.waiting import HANG_S

PNG, JPEG = b"\x89PNG", b"\xff\xd8\xff"
MIB = 1 << 20


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    return path


def test_files_and_bytes_become_a_prompt_in_order(picture):
    expected = MultimodalPrompt("a <image> b <image> c <image>", (JPEG, PNG, PNG))
    images = [JPEG, picture, str(picture)]
    for given in (images, tuple(images), iter(images)):
        assert with_images(expected.text, given) == expected


def test_a_single_image_is_not_a_sequence(picture):
    for image in (PNG, picture, str(picture)):
        assert with_images("t", image) == with_images("t", [image]) == MultimodalPrompt("t", (PNG,))


@pytest.mark.parametrize("prompt", ["text", (1, 2, 3)])
def test_without_images_a_prompt_is_unchanged(prompt):
    assert with_images(prompt, ()) is prompt


@pytest.mark.parametrize(
    ("prompt", "images", "text"),
    [
        ((1, 2), [PNG], "must be a string"),
        ("t", [PNG] * (IMAGES_MAX + 1), "at most 16 images, got 17"),
        ("t", [PNG, b""], "image 2 is empty"),
        (
            "t",
            [bytes(IMAGE_BYTES_MAX + 1)],
            f"image 1 must have at most {IMAGE_BYTES_MAX} bytes",
        ),
        ("t", [bytes(IMAGE_BYTES_MAX)] * 5, r"bytes together, the first 5 have"),
        ("t", [bytearray(PNG)], "image 1 must be .* got a bytearray"),
        ("t", [None], "image 1 must be .* got a NoneType"),
    ],
)
def test_images_over_a_bound_are_refused_before_sending(controller, prompt, images, text):
    with Client(controller.directory) as client, pytest.raises(Malformed, match=text):
        client.generate(prompt, images=images)
    assert not controller.received


def test_a_refused_file_is_named_and_not_read_beyond_the_bound(tmp_path, picture):
    large, empty = tmp_path / "large.png", tmp_path / "empty.png"
    empty.touch()
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for path, text in ((large, "image 2, '.*large.png', must have"), (empty, "empty.png', is emp")):
        with pytest.raises(Malformed, match=text):
            with_images("t", [picture, path])
    with pytest.raises(FileNotFoundError, match="missing"):
        with_images("t", [tmp_path / "missing"])


def test_the_allowed_number_of_bytes_can_be_sent(controller):
    images = [bytes(IMAGE_BYTES_MAX)] * (IMAGES_BYTES_MAX // IMAGE_BYTES_MAX)
    with Client(controller.directory, timeout_s=HANG_S) as client:
        assert client.generate("x" * 1000, images=images).text() == "one"
    (request,) = controller.requests(rq.Generate)
    assert request.prompt.images == tuple(images)


@pytest.mark.parametrize("loss", ["nothing", "chunks", "answers"])
def test_both_clients_send_images_and_recover_from_losses(controller, picture, loss):
    async def generate():
        async with AsyncClient(controller.directory, timeout_s=HANG_S) as client:
            return await client.generate("t", "upper", images=picture).text()

    controller.lose_chunks = 2 if loss == "chunks" else 0
    controller.lose = 2 if loss == "answers" else 0
    with Client(controller.directory, timeout_s=HANG_S) as client:
        assert client.generate("t", "upper", images=[picture]).text() == "one"
    assert asyncio.run(generate()) == "one"
    assert {request.prompt for request in controller.received} == {MultimodalPrompt("t", (PNG,))}
    assert controller.answered == 2


def begin(client, images, now=0.0):
    request = rq.Generate("", "upper", with_images("t", images), Sampling(max_tokens=3))
    return client.begin(request, now, 600.0)


def sendings(client, until):
    """Return when the frames of an unanswered call are sent."""
    times = []
    while (now := client.wake_at()) < until:
        times += [now] * len(client.due(now))
    return times


def test_a_long_frame_is_sent_less_often_than_a_short_one():
    short, long = session(), session()
    begin(short, [bytes(FRAME_BYTES_MAX - 1000)])
    call = begin(long, [bytes(IMAGE_BYTES_MAX)])
    assert sendings(short, 20.0) == [0.0, 0.5, 1.5, 3.5, 7.5, 12.5, 17.5]
    assert sendings(long, 130.0) == pytest.approx([0.0, 4.0, 12.0, 28.0, 60.0, 100.0], rel=1e-3)
    # No more bytes per second than the longest text.
    rate = len(call.body) / (call.wake_at - 100.0)
    assert rate == pytest.approx(FRAME_BYTES_MAX / TIMING.retry_s_max, rel=1e-3)


def test_between_tokens_a_long_frame_is_postponed_too():
    client = session()
    call = begin(client, [bytes(4 * MIB)])
    (request,) = sent(client.due(0.0))
    assert REQUESTS.encode_body(request) == REQUESTS.encode_body(call.request)
    stream(client, call, 1.0, 0, 1)
    assert call.send_at == pytest.approx(1.0 + 4 * TIMING.retry_s_min, rel=1e-3)
