"""Frames of requests: their bounds, batches, and requests that can't be read."""

import random
from typing import Any

import msgspec
import pytest

from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import (
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    MultimodalPrompt,
)
from loradock.messages.requests import (
    ActivateAdapter,
    ActivateBatch,
    CancelGeneration,
    Classify,
    Embed,
    Generate,
    ListAdapters,
    LoadAdapter,
)
from loradock.messages.wire import (
    BATCH_MAX,
    FRAME_BYTES_MAX,
    ILLUSTRATED_BYTES_MAX,
    REQUESTS,
    WireError,
)
from tests.support.seeds import fresh_seed

TOKEN = b"a client's t"
EPOCH = 3
HEAD = REQUESTS.encode((), EPOCH, 0, TOKEN)[:32]


def refused(frame: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        REQUESTS.decode(frame)
    assert caught.value.code is ErrorCode.MALFORMED
    return caught.value


def illustrated(text: str, *sizes: int) -> bytes:
    """Return a request's frame, with images of these sizes in bytes."""
    prompt = MultimodalPrompt(text, tuple(map(bytes, sizes)))
    return REQUESTS.encode((Generate("r", None, prompt),))


def test_images_alone_make_a_request_long() -> None:
    whole = [IMAGE_BYTES_MAX] * (IMAGES_BYTES_MAX // IMAGE_BYTES_MAX)
    wide = "𝄞" * (FRAME_BYTES_MAX // 4 - 50)
    largest = illustrated(wide, *whole)
    assert ILLUSTRATED_BYTES_MAX - 200 < len(largest) <= ILLUSTRATED_BYTES_MAX
    assert REQUESTS.encode(REQUESTS.decode(largest).message) == largest
    assert f"and {IMAGES_BYTES_MAX + 1} bytes" in str(refused(illustrated("", *whole, 1)))
    assert "at most" in str(refused(illustrated("", *whole, IMAGE_BYTES_MAX)))
    # The rest of the request has its own bound.
    assert "bytes of images" in str(refused(illustrated(wide + "𝄞" * 50, 2 << 20)))


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0), (IMAGE_BYTES_MAX + 1,), (1,) * 17])
def test_images_are_bounded_in_number_and_size(sizes: tuple[int, ...]) -> None:
    assert IMAGES_MAX == 16
    error = str(refused(illustrated("t", *sizes)))
    assert "$[0][3].images" in error


@pytest.mark.parametrize("kind", [Embed, Classify, ActivateBatch])
def test_no_other_request_is_decoded_from_a_long_frame(kind: Any) -> None:
    images = {"text": "t", "images": [bytes(2 << 20)]}
    for field in (["x" * 900_000, "x" * 900_000], [images]):
        frame = HEAD + msgspec.msgpack.encode([[kind.__name__, "r", None, field]])
        assert "and 0 bytes of images" in str(refused(frame))


@pytest.mark.parametrize("kind", [Embed, Classify])
def test_only_generation_accepts_images(kind: Any) -> None:
    fields = [kind.__name__, "r", None, [{"text": "t", "images": [b"x"]}]]
    error = refused(HEAD + msgspec.msgpack.encode([fields]))
    assert "got `object`" in str(error)


BAD_NAMES = ["", ".", "..", "../x", "a/b", "a..b", "a\n", "a\x00", "a b", "ä", "a\\b", "n" * 129]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_leave_a_directory_are_refused(name: str) -> None:
    for message in (LoadAdapter("r", name), ActivateAdapter("r", name), Generate("r", name, "")):
        refused(REQUESTS.encode((message,)))


@pytest.mark.parametrize("name", ["a", "A-1_b.c", ".hidden", "n" * 128, "v1.2.3", "-"])
def test_names_within_the_pattern_are_read(name: str) -> None:
    message = (LoadAdapter("r", name),)
    assert REQUESTS.decode(REQUESTS.encode(message)).message == message


@pytest.mark.parametrize("request_id", ["", "r" * 65, "r" * 97])
def test_request_ids_have_bounds(request_id: str) -> None:
    refused(REQUESTS.encode((ListAdapters(request_id),)))
    refused(REQUESTS.encode((CancelGeneration("r", request_id),)))


def test_a_frame_has_bounds() -> None:
    most = tuple(ListAdapters(str(number)) for number in range(BATCH_MAX))
    assert REQUESTS.decode(REQUESTS.encode(most)).message == most
    for wrong in ((), (*most, most[0])):
        refused(REQUESTS.encode(wrong))
    with pytest.raises(WireError):
        REQUESTS.decode_each(REQUESTS.encode(()))


def test_requests_are_joined_as_they_are_encoded_together() -> None:
    together = (LoadAdapter("a", "x"), ListAdapters("b"))
    bodies = [REQUESTS.encode_body(request) for request in together]
    assert REQUESTS.join_for(TOKEN, bodies, EPOCH) == REQUESTS.encode(together, EPOCH, 0, TOKEN)
    assert [REQUESTS.decode_body(body) for body in bodies] == list(together)
    for count in (1, 2):
        received = REQUESTS.decode_each(REQUESTS.join_for(TOKEN, bodies[:count]))
        assert (received.token, received.requests, received.refused) == (
            TOKEN,
            together[:count],
            (),
        )
        assert [bytes(body) for body in received.bodies] == bodies[:count]


UNREADABLE: dict[str, Any] = {
    "an unknown request": ["NoSuchRequest", "bad", 1],
    "a wrong field": ["LoadAdapter", "bad", "..", ""],
    "too many fields": ["ShowStatus", "bad", 1],
    "a long id": ["ShowStatus", "r" * 65],
    "no id": ["ShowStatus"],
    "an id that is a number": ["ShowStatus", 7],
    "an id with a space": ["ShowStatus", "a b"],
    "no request": 7,
    "an empty array": [],
}
READABLE_IDS = ("an unknown request", "a wrong field", "too many fields")


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_request_is_refused_alone_and_by_its_id(name: str) -> None:
    good = [msgspec.to_builtins(ListAdapters(request_id)) for request_id in ("a", "b")]
    body = msgspec.msgpack.encode([good[0], UNREADABLE[name], good[1]])
    received = REQUESTS.decode_each(HEAD + body)
    assert received.token == TOKEN
    assert received.requests == (ListAdapters("a"), ListAdapters("b"))
    [refusal] = received.refused
    assert refusal.request_id == ("bad" if name in READABLE_IDS else "")
    assert refusal.code is ErrorCode.MALFORMED


def test_a_cut_frame_is_refused_by_the_id_of_its_first_request() -> None:
    for request_id in ("r", "r" * 64):
        for count in (1, 20):
            frame = REQUESTS.encode((LoadAdapter(request_id, "a", "p"),) * count)
            with pytest.raises(WireError) as caught:
                REQUESTS.decode_each(frame[:-1])
            assert caught.value.request_id == request_id


def test_long_requests_that_share_a_frame_are_refused_one_by_one() -> None:
    shared = tuple(Generate(name, None, "p" * 600_000) for name in ("a", "b"))
    received = REQUESTS.decode_each(REQUESTS.encode(shared))
    assert received.requests == ()
    assert [refusal.request_id for refusal in received.refused] == ["a", "b"]


def test_every_request_of_any_bytes_is_refused_or_read() -> None:
    """Mutated frames raise `WireError`, or each of their requests is read or refused."""
    rng = random.Random(fresh_seed())
    frame = REQUESTS.encode(tuple(LoadAdapter(f"r-{n}", "a", "p") for n in range(5)))
    for _ in range(5000):
        wrong = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            wrong[rng.randrange(len(HEAD), len(wrong))] = rng.randrange(256)
        try:
            received = REQUESTS.decode_each(bytes(wrong))
        except WireError:
            continue
        assert 1 <= len(received.requests) + len(received.refused) <= BATCH_MAX
        bodies = [REQUESTS.decode_body(bytes(body)) for body in received.bodies]
        assert bodies == list(received.requests)
