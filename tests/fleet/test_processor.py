"""The endpoint picker protocol, message by message, as gateways of Kubernetes speak it."""

import json
from typing import Any

import pytest

from loradock.fleet.ext_proc import (
    BODY_BUFFERED,
    BODY_BYTES_MAX,
    BODY_STREAMED,
    ProcessingRequest,
    ProcessingResponse,
)
from loradock.fleet.picker import Load, Picker, Seen
from loradock.fleet.processor import DESTINATION, Processor, model_of


def picker() -> Picker:
    found = Picker()
    found.set_docks({"10.0.0.1:1": 1, "10.0.0.2:1": 1})
    for dock in ("10.0.0.1:1", "10.0.0.2:1"):
        found.on_snapshot(dock, {"upper": Seen("evicted")})
        found.on_load(dock, Load(), 0.0)
    found.on_adapter("10.0.0.2:1", "upper", Seen("gpu-slot"))
    return found


def answers(*requests: Any, found: Picker | None = None) -> list[Any]:
    """Return the responses to the messages about one request."""
    exchange = Processor(found or picker(), "k" * 16).begin()
    responses = []
    for request in requests:
        assert not exchange.is_over
        responses += exchange.on_message(request.SerializeToString())
    return [ProcessingResponse.FromString(one) for one in responses]


def headers(end_of_stream: bool = False, streamed: bool = False, **named: str) -> Any:
    request = ProcessingRequest()
    for key, value in {":path": "/v1/completions", **named}.items():
        request.request_headers.headers.headers.add(
            key=key.replace("_", "-"), raw_value=value.encode()
        )
    request.request_headers.end_of_stream = end_of_stream
    if streamed:
        request.protocol_config.request_body_mode = BODY_STREAMED
    return request


def body(data: bytes, end_of_stream: bool = True) -> Any:
    return ProcessingRequest(request_body={"body": data, "end_of_stream": end_of_stream})


def destination(response: Any) -> str:
    (header,) = response.header_mutation.set_headers
    assert header.header.key == DESTINATION
    return header.header.raw_value.decode()


ORDER = "10.0.0.2:1,10.0.0.1:1"


def test_a_whole_body_is_answered_with_the_header() -> None:
    first, second = answers(headers(), body(b'{"model": "upper"}'))
    assert not first.request_headers.response.header_mutation.set_headers
    assert first.mode_override.request_body_mode == BODY_BUFFERED
    assert destination(second.request_body.response) == ORDER


def test_a_whole_body_that_trailers_follow_is_answered() -> None:
    _, second = answers(headers(), body(b'{"model": "upper"}', end_of_stream=False))
    assert destination(second.request_body.response) == ORDER


@pytest.mark.parametrize("size", [0, 10, 62_000, 200_000])
def test_a_streamed_body_comes_back_after_the_header(size: int) -> None:
    data = json.dumps({"model": "upper", "prompt": "x" * size}).encode()
    parts = [body(data[:9], False), body(data[9:], False), body(b"")]
    first, *rest = answers(headers(streamed=True), *parts)
    assert destination(first.request_headers.response) == ORDER
    assert first.dynamic_metadata["envoy.lb"][DESTINATION] == ORDER
    sent = [one.request_body.response.body_mutation.streamed_response for one in rest]
    assert b"".join(one.body for one in sent) == data
    assert [one.end_of_stream for one in sent] == [False] * (len(sent) - 1) + [True]
    assert max(len(one.body) for one in sent) < 64 << 10


def test_a_streamed_body_without_an_end_is_refused_at_its_bound() -> None:
    exchange = Processor(picker(), "k" * 16).begin()
    part = body(bytes(BODY_BYTES_MAX // 4), False)
    for message in (headers(streamed=True), *[part] * 4):
        assert exchange.on_message(message.SerializeToString()) == []
    (refused,) = exchange.on_message(body(b"x", False).SerializeToString())
    assert ProcessingResponse.FromString(refused).immediate_response.status.code == 413
    assert exchange.is_over


def test_a_request_without_a_body_is_answered_at_once() -> None:
    (first,) = answers(headers(end_of_stream=True))
    assert {*destination(first.request_headers.response).split(",")} == {*ORDER.split(",")}


def test_an_adapter_in_a_header_needs_no_body() -> None:
    (first,) = answers(headers(x_loradock_adapter="upper"))
    assert destination(first.request_headers.response) == ORDER


def test_a_model_that_the_proxy_has_read_needs_no_body() -> None:
    request = headers()
    named = request.metadata_context.filter_metadata.add(key="loradock")
    named.value.update({"model": "upper"})
    (first,) = answers(request)
    assert destination(first.request_headers.response) == ORDER


def test_trailers_end_a_body() -> None:
    data = b'{"model": "upper"}'
    trailers = ProcessingRequest(request_trailers={})
    first, chunk, last = answers(headers(streamed=True), body(data, False), trailers)
    assert destination(first.request_headers.response) == ORDER
    sent = chunk.request_body.response.body_mutation.streamed_response
    assert (sent.body, sent.end_of_stream) == (data, False)
    assert last.HasField("request_trailers")


@pytest.mark.parametrize("ends", [True, False])
def test_a_response_that_a_gateway_sends_comes_back_unchanged(ends: bool) -> None:
    asked = headers(end_of_stream=True, streamed=True)
    asked.protocol_config.response_body_mode = BODY_STREAMED
    data = b"x" * 100_000
    sent = ProcessingRequest(response_body={"body": data, "end_of_stream": ends})
    about = [ProcessingRequest(**{kind: {}}) for kind in ("response_headers", "response_trailers")]
    _, first, *chunks, last = answers(asked, about[0], sent, about[1])
    assert first.HasField("response_headers")
    assert last.HasField("response_trailers")
    parts = [one.response_body.response.body_mutation.streamed_response for one in chunks]
    assert b"".join(part.body for part in parts) == data
    assert [part.end_of_stream for part in parts] == [False, ends]


def test_a_response_in_one_message_is_left_as_it_is() -> None:
    asked = headers(end_of_stream=True, streamed=True)
    _, second = answers(asked, ProcessingRequest(response_body={"body": b"x"}))
    assert second.HasField("response_body")
    assert not second.response_body.response.HasField("body_mutation")


def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ProcessingRequest"):
        Processor(picker(), "k" * 16).begin().on_message(b"\xff")


def test_without_docks_the_choice_of_a_client_is_removed() -> None:
    _, second = answers(headers(), body(b"{}"), found=Picker())
    assert second.request_body.response.header_mutation.remove_headers == [DESTINATION]


@pytest.mark.parametrize(
    ("data", "model"),
    [(b'{"model": "a", "x": [1]}', "a"), (b"{", ""), (b"", ""), (b'{"model": 1}', ""),
     (b"\xff", ""), (b'{"model": null}', "")],
)  # fmt: skip
def test_the_model_of_a_body(data: bytes, model: str) -> None:
    assert model_of(data) == model
