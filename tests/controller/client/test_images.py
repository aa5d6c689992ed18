"""Images go out as they are, to a bound, and are not sent again and again."""

import asyncio
import itertools

import pytest
from client_examples import TIMING, sent, session, stream

from controller.client import AsyncClient, Client, Malformed
from controller.client.images import with_images
from controller.client.session import generate_request
from messages import requests as rq
from messages.requests import IMAGE_BYTES_MAX, IMAGES_BYTES_MAX, IMAGES_MAX, IllustratedPrompt
from messages.wire import FRAME_BYTES_MAX, REQUESTS
from tests.support.simulation.standin_controller import StandIn

PNG, JPEG = b"\x89PNG", b"\xff\xd8\xff"
MIB = 1 << 20


@pytest.fixture
def controller(tmp_path):
    with StandIn(tmp_path) as stand_in:
        yield stand_in


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    return path


def test_files_and_bytes_become_a_prompt_in_their_order(picture):
    expected = IllustratedPrompt("a <image> b <image> c <image>", (JPEG, PNG, PNG))
    images = [JPEG, picture, str(picture)]
    for given in (images, tuple(images), iter(images)):
        assert with_images(expected.text, given) == expected


def test_one_image_alone_is_not_taken_for_its_parts(picture):
    for image in (PNG, picture, str(picture)):
        assert (
            with_images("t", image) == with_images("t", [image]) == IllustratedPrompt("t", (PNG,))
        )


@pytest.mark.parametrize("prompt", ["text", (1, 2, 3)])
def test_without_images_a_prompt_stays_as_it_is(prompt):
    assert with_images(prompt, ()) is prompt


@pytest.mark.parametrize(
    ("prompt", "images", "told"),
    [
        ((1, 2), [PNG], "need a text"),
        ("t", [PNG] * (IMAGES_MAX + 1), r"17 images; .* 16"),
        ("t", [PNG, b""], "image 2 is empty"),
        ("t", [bytes(IMAGE_BYTES_MAX + 1)], f"image 1 is longer than the {IMAGE_BYTES_MAX} bytes"),
        ("t", [bytes(IMAGE_BYTES_MAX)] * 5, r"first 5 images have .* bytes together"),
        ("t", [bytearray(PNG)], "image 1 is a bytearray"),
        ("t", [None], "image 1 is a NoneType"),
    ],
)
def test_what_no_request_can_carry_is_told_before_it_is_sent(controller, prompt, images, told):
    with Client(controller.directory) as client, pytest.raises(Malformed, match=told):
        client.generate(prompt, images=images)
    assert not controller.received


def test_a_file_is_named_and_not_read_beyond_the_bound(tmp_path, picture):
    large, empty = tmp_path / "large.png", tmp_path / "empty.png"
    empty.touch()
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for path, told in ((large, "image 2, '.*large.png', is longer"), (empty, "empty.png', is emp")):
        with pytest.raises(Malformed, match=told):
            with_images("t", [picture, path])
    with pytest.raises(FileNotFoundError, match="missing"):
        with_images("t", [tmp_path / "missing"])


def test_as_many_bytes_as_are_allowed_can_be_said(controller):
    images = [bytes(IMAGE_BYTES_MAX)] * (IMAGES_BYTES_MAX // IMAGE_BYTES_MAX)
    with Client(controller.directory, timeout_s=20.0) as client:
        assert client.generate("x" * 1000, images=images).text() == "one"
    (request,) = controller.requests(rq.Generate)
    assert request.prompt.images == tuple(images)


@pytest.mark.parametrize("loss", ["nothing", "chunks", "answers"])
def test_both_clients_send_them_and_read_on_through_losses(controller, picture, loss):
    async def ask_side_by_side():
        async with AsyncClient(controller.directory, timeout_s=20.0) as client:
            running = [await client.generate("t", "upper", images=picture) for _ in range(3)]
            return [await generation.text() for generation in running]

    controller.lose_chunks = 2 if loss == "chunks" else 0
    controller.lose = 2 if loss == "answers" else 0
    with Client(controller.directory, timeout_s=20.0) as client:
        assert client.generate("t", "upper", images=[picture]).text() == "one"
    assert asyncio.run(ask_side_by_side()) == ["one"] * 3
    assert {request.prompt for request in controller.received} == {IllustratedPrompt("t", (PNG,))}
    assert len({request.request_id for request in controller.received}) == 4


def test_after_a_restart_the_images_are_sent_again(controller):
    """The answer of the first life never comes; the second one's word to another call is enough."""
    silent, said = itertools.chain([True], itertools.repeat(False)), []

    def answer(request):
        said.append(request.prompt)
        return None if next(silent) else controller._generate(request)

    controller.answers[rq.Generate] = answer
    image = bytes(5 * MIB)
    with Client(controller.directory, timeout_s=20.0) as client:
        client.status()
        generation = client.generate("t", images=[image])
        client.status()
        controller.restart()
        client.status()
        assert generation.text() == "one"
    assert said == [IllustratedPrompt("t", (image,))] * 2


def begin(client, images, now=0.0):
    request = generate_request(with_images("t", images), "upper", {"max_tokens": 3})
    return client.begin_generation(request, now, 600.0)


def sendings(client, until):
    """When the frames of a silent client's only call go out."""
    times = []
    while (now := client.wake_at()) < until:
        times += [now] * len(client.due(now))
    return times


def test_a_long_frame_goes_out_less_often_than_a_short_one():
    short, long = session(), session()
    begin(short, [bytes(FRAME_BYTES_MAX - 1000)])
    call = begin(long, [bytes(IMAGE_BYTES_MAX)])
    assert sendings(short, 20.0) == [0.0, 0.5, 1.5, 3.5, 7.5, 12.5, 17.5]
    assert sendings(long, 130.0) == pytest.approx([0.0, 4.0, 12.0, 28.0, 60.0, 100.0], rel=1e-3)
    # No more bytes a second than the longest text.
    rate = len(call.frame) / (call.wake_at - 100.0)
    assert rate == pytest.approx(FRAME_BYTES_MAX / TIMING.retry_s_max, rel=1e-3)


def test_between_tokens_a_long_frame_is_held_back_too():
    client = session()
    call = begin(client, [bytes(4 * MIB)])
    (request,) = sent(client.due(0.0))
    assert REQUESTS.encode(request) == REQUESTS.encode(call.request)
    stream(client, call, 1.0, 0, 1)
    assert call.send_at == pytest.approx(1.0 + 4 * TIMING.retry_s_min, rel=1e-3)
