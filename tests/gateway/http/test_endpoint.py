"""Bodies within bounds, and requests that end with their clients."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from loradock.gateway.http.endpoint import CONNECTION, Watch, read_body
from loradock.gateway.http.errors import HttpError
from tests.support.gateway.served import Served, post_bytes, read_all, serve_gateway
from tests.support.simulation.standin_controller import StandIn

PATH = "/v1/completions"
EVERY_POST = (
    *(PATH, "/v1/chat/completions", "/v1/embeddings", "/classify", "/pooling", "/score"),
    *("/tokenize", "/detokenize", "/v1/load_lora_adapter", "/unload_lora_adapter"),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway with small bounds."""
    bounds: dict[str, Any] = {
        "body_bytes_max": 2000,
        "header_bytes_max": 4000,
        "receive_timeout_s": 1,
    }
    with (
        StandIn(tmp_path_factory.mktemp("gw")) as controller,
        serve_gateway(controller, allow_runtime_lora_updating=True, **bounds) as gateway,
    ):
        yield gateway


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def test_a_declared_long_body_is_refused_unread(small: Served) -> None:
    for path in EVERY_POST:
        assert status_of(small.raw(post_bytes(path, b"", length=10**12))) == 413


def test_an_undeclared_long_body_is_refused(small: Served) -> None:
    chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    assert status_of(small.raw(head.encode() + chunk * 3 + b"0\r\n\r\n")) == 413


def test_a_body_that_does_not_arrive_is_refused(small: Served) -> None:
    assert status_of(small.raw(post_bytes(PATH, b'{"prompt"', length=100))) == 408


def test_a_long_head_is_refused(small: Served) -> None:
    long = b"a" * 5000
    complete = (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: " + long + b"\r\n\r\n"
    )
    assert status_of(small.raw(complete)) == 431
    target = b"GET /health?" + long + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert status_of(small.raw(target)) == 431


def test_an_endless_head_is_refused(small: Served) -> None:
    with small.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 2000)
        assert status_of(read_all(connection)) == 431


@pytest.mark.parametrize(
    "data",
    [b"\x00\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"{}\r\n\r\n"],
)
def test_what_is_not_http_is_refused(small: Served, data: Any) -> None:
    assert status_of(small.raw(data)) == 400


@pytest.mark.parametrize("path", EVERY_POST)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xff\xfe", b'{"a": "\xff"}', b"[]", b"5", b'"x"', b"null", b"{" * 500),
        *(b'{"prompt": "\\ud800"}', b'{"a": 1}', b"[" * 1000 + b"]" * 1000, b'{"model": {}}'),
    ],
)
def test_a_damaged_body_is_refused_everywhere(small: Served, path: Any, body: Any) -> None:
    answer = small.raw(post_bytes(path, body))
    assert status_of(answer) == 400
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == 400
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_other_types_of_content_are_refused(small: Served, content_type: str) -> None:
    response = small.http.post(PATH, content=b"{}", headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["type"] == "UnsupportedMediaTypeError"


def test_a_charset_is_part_of_the_type(small: Served) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = small.http.post(PATH, content=b'{"prompt": "p"}', headers=headers)
    assert response.status_code == 200


def test_a_body_of_several_parts_is_joined() -> None:
    parts: list[tuple[bytes, bool]] = []

    async def receive() -> Any:
        body, more = parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": more}

    for has_received_all in (False, True):
        connection = SimpleNamespace(has_received_all=has_received_all)
        scope: Any = {"headers": [], "extensions": {CONNECTION: connection}}
        parts += [(b"ab", True), (b"c", True), (b"", False)]
        assert asyncio.run(read_body(scope, receive, 3, 60)) == b"abc"
        parts += [(b"ab", True), (b"cd", False)]
        with pytest.raises(HttpError):
            asyncio.run(read_body(scope, receive, 3, 60))


class Lost:
    """A connection that the test loses."""

    def __init__(self, is_lost: bool = False) -> None:
        self.watch: Any = None
        self.is_lost = is_lost

    def set_watch(self, watch: Any) -> None:
        self.watch = watch
        if watch is not None and self.is_lost:
            watch.on_left()


async def watched(connection: Any, work: Any) -> Any:
    """Run `work` as a request does; return whether it ended because its client left."""
    watch = Watch(connection)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.take_cancellation():
            raise
        return True
    finally:
        watch.end()
    return False


async def never() -> None:
    await asyncio.Event().wait()


def test_a_lost_connection_ends_its_request() -> None:
    async def main() -> None:
        connection = Lost()
        task = asyncio.create_task(watched(connection, never()))
        await asyncio.sleep(0)
        connection.watch.on_left()
        assert await task
        # The connection forgets the request.
        assert connection.watch is None

    asyncio.run(main())


def test_a_connection_that_was_lost_before_ends_its_request() -> None:
    assert asyncio.run(watched(Lost(is_lost=True), never()))


def test_a_request_that_ends_in_time_is_not_cancelled() -> None:
    assert not asyncio.run(watched(Lost(), asyncio.sleep(0)))


@pytest.mark.parametrize("has_left", [False, True])
def test_a_cancellation_by_the_server_is_not_taken_for_the_client(has_left: bool) -> None:
    async def main() -> None:
        connection = Lost()
        task = asyncio.create_task(watched(connection, never()))
        await asyncio.sleep(0)
        if has_left:
            connection.watch.on_left()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
