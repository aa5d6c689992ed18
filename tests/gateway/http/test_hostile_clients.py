"""Clients that would stop the gateway for others: what each makes it do is counted, not timed."""

import asyncio
import base64
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loradock.gateway.http import endpoint
from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference import chat as chat_endpoint
from loradock.gateway.inference import images, pooling, prompts
from loradock.gateway.inference.chat_template import ChatTemplate
from loradock.gateway.inference.prompts import json_size
from loradock.gateway.inference.tokenizer import PIECE_CHARACTERS, Tokenizer
from loradock.gateway.inference.workers import INLINE_SIZE
from loradock.gateway.server import process
from loradock.messages import requests as rq
from loradock.messages.prompts import IMAGE_BYTES_MAX, PROMPT_CHARACTERS_MAX
from tests.support.gateway.served import (
    Served,
    model_directory,
    post_bytes,
    read_all,
    serve_gateway,
)
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import wait_until

LONG = "x" * PROMPT_CHARACTERS_MAX


class Work(list[tuple[str, int, str]]):
    """What was done: its kind, its size in characters, tokens or numbers, and its thread's name."""

    def sizes(self, kind: str = "encode") -> list[int]:
        return [size for found, size, _ in self if found == kind]

    @property
    def inline(self) -> list[int]:
        """The sizes of what did not run in a thread of the workers."""
        return [size for _, size, thread in self if not thread.startswith("worker")]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    done = Work()

    def recorded(owner: Any, name: str, size_of: Any) -> None:
        usual = getattr(owner, name)

        def method(*arguments: Any, **keywords: Any) -> Any:
            done.append((name, size_of(*arguments), threading.current_thread().name))
            return usual(*arguments, **keywords)

        monkeypatch.setattr(owner, name, method)

    recorded(Tokenizer, "encode", lambda _, text: len(text))
    recorded(Tokenizer, "decode", lambda _, tokens: len(tokens))
    recorded(Tokenizer, "token_texts", lambda _, tokens: len(tokens))
    recorded(ChatTemplate, "render", lambda _, messages, __: len(json.dumps(messages)))
    recorded(chat_endpoint, "plan_of", lambda body, _: json_size(body.tools))
    recorded(pooling, "_dot", lambda row, _: len(row))
    recorded(pooling, "_encoded", lambda row, _: len(row) + 1)
    return done


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


MANY_PARTS = [{"type": "text", "text": "x" * 100}] * 4096

LONG_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": ("/v1/completions", {"prompt": [LONG] * 4, "echo": True, "logprobs": 1}),
    "count": (
        "/v1/completions",
        {
            "prompt": LONG,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "token ids": ("/v1/completions", {"prompt": [LONG, LONG], "return_token_ids": True}),
    "truncation": ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 5}),
    "many prompts": (
        "/v1/completions/render",
        {"prompt": ["x" * 40] * 2048, "add_special_tokens": False},
    ),
    "echo of token ids": ("/v1/completions", {"prompt": [[65] * 30_000] * 8, "echo": True}),
    "tokenize": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [65] * 200_000}),
    "chat": ("/v1/chat/completions", chat(LONG[:-100])),
    "chat of parts": ("/v1/chat/completions", chat(MANY_PARTS)),
    "tokenized chat": ("/tokenize", chat(LONG[:-100])),
    "responses": ("/v1/responses", {"input": LONG[:-100]}),
    "messages": ("/v1/messages", {"model": "upper", "max_tokens": 1, **chat(LONG[:-100])}),
    "count of messages": ("/v1/messages/count_tokens", {"model": "upper", **chat(LONG[:-100])}),
    "tools": (
        "/v1/chat/completions",
        {
            **chat("hi"),
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(1000)],
            "truncate_prompt_tokens": 5,
        },
    ),
    "rerank": ("/rerank", {"query": "q", "documents": [f"{n}" for n in range(2047)]}),
    "score": ("/score", {"text_1": ["q"] * 2048, "text_2": ["d"] * 2048}),
    "embeddings": ("/v1/embeddings", {"input": ["x"] * 2048}),
}


@pytest.mark.parametrize("name", LONG_REQUESTS)
def test_long_texts_are_processed_in_threads(served: Served, work: Work, name: str) -> None:
    path, body = LONG_REQUESTS[name]
    response = served.post(path, body)
    assert response.status_code in (200, 400), response.text
    assert work
    assert sum(work.inline) <= INLINE_SIZE


@pytest.mark.parametrize("name", ["echo", "count", "token ids", "chat", "responses", "messages"])
def test_a_text_is_read_until_it_exceeds_the_context(served: Served, work: Work, name: str) -> None:
    """The context has 512 tokens; a token of this text is a character."""
    path, body = LONG_REQUESTS[name]
    response = served.post(path, body)
    assert response.status_code == 400
    assert "L019" in response.text
    assert sum(work.sizes()) <= 2 * PIECE_CHARACTERS


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": ["x" * 3000] * 1025, "n": 2, "echo": True, "logprobs": 1}, "at most 2048"),
        ({"prompt": ["x"] * 2049, "add_special_tokens": False}, "at most 2048"),
        ({"prompt": [[]] * 100_000, "echo": True}, "at most 2048"),
        ({"prompt": [LONG[:-1]] * 5, "return_token_ids": True}, "at most 4000000"),
        ({"prompt": ["x", LONG + "x"], "truncate_prompt_tokens": 1}, "1000001 characters"),
    ],
    ids=["n", "prompts", "empty prompts", "sum", "length"],
)
def test_numbers_and_lengths_are_compared_before_anything_is_tokenized(
    served: Served, work: Work, body: Any, problem: str
) -> None:
    assert problem in served.refused("/v1/completions", body)["message"]
    assert work == []
    assert not served.controller.requests(rq.Generate)


def test_a_body_of_many_values_is_not_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    usual = endpoint.decode

    def decode(decoder: Any, body: Any) -> Any:
        decoded.append(len(body))
        return usual(decoder, body)

    monkeypatch.setattr(endpoint, "decode", decode)
    for item in (b"[],", b"{},", b"1,"):
        body = b'{"prompt": [' + item * (2_700_000) + item[:-1] + b"]}"
        assert len(body) > 256 << 10
        response = served.http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
        assert "at most" in response.json()["error"]["message"]
    assert decoded == []


def test_values_are_counted_before_the_body_has_arrived() -> None:
    received: list[bytes] = []

    async def receive() -> Any:
        received.append(b"1," * 4096)
        return {"type": "http.request", "body": received[-1], "more_body": True}

    scope = {"headers": [], "extensions": {endpoint.CONNECTION: SimpleNamespace(
        has_received_all=False)}}  # fmt: skip
    with pytest.raises(HttpError, match="commas"):
        asyncio.run(endpoint.read_body(scope, receive, 1 << 30, 60.0))
    assert len(received) == (1 << 20) // 4096 + 1


class AnyClient:
    """Lets every request pass."""

    def refusal(self, _endpoint: Any, _scope: Any) -> None:
        return None

    def client_of(self, _scope: Any) -> str:
        return ""


def test_other_tasks_run_between_long_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have arrived at once, and each would stop the loop for a time."""
    turns, decoded_at = [0], []
    monkeypatch.setattr(endpoint, "decode", lambda *_: decoded_at.append(turns[0]))
    body = b'{"user": "' + b"x" * (1 << 20) + b'"}'
    connection = SimpleNamespace(has_received_all=True, set_watch=lambda _: None)
    scope = {
        "type": "http",
        "method": "POST",
        "headers": [(b"content-type", b"application/json")],
        "extensions": {endpoint.CONNECTION: connection},
    }

    async def answer(body: Any) -> str:
        return str(body)

    async def serve_one(app: Any) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(_: Any) -> None:
            pass

        await app(scope, receive, send)

    async def main() -> None:
        async def other_task() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        limits = endpoint.BodyLimits(8 << 20, 60.0, asyncio.Lock())
        served = endpoint.Endpoint(
            method="POST", path="/", handler=answer, summary="", body=dict[str, Any]
        )
        app = endpoint.EndpointApp(served, limits, AnyClient(), None)
        other = asyncio.create_task(other_task())
        await asyncio.gather(*(serve_one(app) for _ in range(16)))
        other.cancel()

    asyncio.run(main())
    assert len(decoded_at) == 16
    assert all(earlier < later for earlier, later in pairwise(decoded_at))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat([{"type": "text", "text": ""}] * 8193)),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": ""}] * 5000}] * 2}),
        ("/v1/messages", {"model": "upper", "max_tokens": 1, **chat(
            [{"type": "text", "text": ""}] * 8193)}),
    ],
)  # fmt: skip
def test_a_chat_of_many_parts_is_refused(served: Served, path: str, body: Any) -> None:
    assert "at most 8192 parts" in served.post(path, body).json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("data:image/png," + "%41" * 1000, "not Base64"),
        ("data:image/png;base64," + "A" * (IMAGE_BYTES_MAX // 3 * 4 + 8), "an image of more than"),
        ("data:" + "a" * 5000 + ";base64,AAAA", "without a comma"),
    ],
    ids=["percent", "length", "head"],
)
def test_a_data_url_is_compared_before_it_is_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch, url: str, problem: str
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(base64, "b64decode", lambda text, **_: decoded.append(len(text)))
    content = [{"type": "image_url", "image_url": {"url": url}}]
    assert problem in served.refused("/v1/chat/completions", chat(content))["message"]
    assert decoded == []


@pytest.mark.parametrize("url", ["https://cdn.example/a.png", "data:image/png;base64,AAAA"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/render", "/tokenize", "/v1/messages/count_tokens"]
)
def test_an_image_that_is_refused_is_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, url: str
) -> None:
    for name in ("fetch_image", "image_of_data_url"):
        monkeypatch.setattr(prompts, name, lambda *_: 1 / 0)
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if path.startswith("/v1/messages"):
        part = {"type": "image", "source": {"type": "url", "url": url}}
    error = served.refused(path, {"model": "upper", **chat([part])})
    assert "images are not served here" in error["message"]


def test_images_are_compared_together_before_one_is_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "IMAGES_BYTES_MAX", 1000)
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: 1 / 0)
    url = "data:image/png;base64," + base64.b64encode(bytes(600)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}] * 2
    assert "together" in served.refused("/v1/chat/completions", chat(content))["message"]


def test_an_image_is_decoded_in_pieces_in_a_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, str]] = []
    usual = base64.b64decode

    def decode(data: str, *, validate: bool) -> bytes:
        calls.append((len(data), threading.current_thread().name))
        return usual(data, validate=validate)

    monkeypatch.setattr(base64, "b64decode", decode)
    image = bytes(range(256)) * (4 << 12)
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    assert served.post("/v1/chat/completions", chat(content)).status_code == 200
    [request] = served.controller.requests(rq.Generate)
    assert request.prompt.images == (image,)
    assert max(size for size, _ in calls) <= 1 << 20
    assert all(thread.startswith("worker") for _, thread in calls)


class Records(logging.Handler):
    """The log records of the HTTP server, as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def log(self, _level: int, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


def test_lines_of_the_http_server_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    records, now = Records(), [0.0]
    monkeypatch.setattr(process, "log", records)
    handler = process.ServerLog(lambda: now[0])
    record = logging.makeLogRecord({"msg": "Invalid HTTP request received.", "levelno": 30})
    for _ in range(1000):
        handler.emit(record)
    assert len(records.lines) == process.LOG_LINES
    now[0] = process.LOG_INTERVAL_S
    handler.emit(record)
    assert records.lines[process.LOG_LINES] == (
        "further lines of the HTTP server were not logged",
        {"lines": 1000 - process.LOG_LINES},
    )
    assert len(records.lines) == process.LOG_LINES + 2


def test_a_body_that_breaks_off_leaves_no_line(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(process.ServerLog, "emit", lambda _, record: lines.append(record))
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    for head in (post_bytes("/v1/completions", b"{", length=100), chunked + b"\r\n5\r\nabc"):
        with served.connect() as connection:
            connection.sendall(head)
    wait_until(lambda: served.get("/load").json() == {"server_load": 0})
    assert lines == []


@pytest.fixture
def brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A gateway with a key, four connections, and little patience after an answer."""
    monkeypatch.setattr(process, "LINGER_S", 0.1)
    model = model_directory(tmp_path)
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller, model=str(model), connections_max=4, api_keys=("k",)) as gateway,
    ):
        gateway.http.close()
        yield gateway


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        ("/not-there", 100, 404),
        ("/v1/models", 100, 405),
        ("/v1/completions", 1 << 30, 401),
        ("/v1/chat/completions", 100, 401),
    ],
)
def test_an_answer_that_precedes_the_body_is_the_last(
    brief: Served, path: str, length: int, status: int
) -> None:
    head = post_bytes(path, b"{", length=length).replace(b"connection: close\r\n", b"")
    with brief.connect() as connection:
        connection.sendall(head)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert b"connection: close" in answer
        # More of the body does not keep the connection.
        connection.sendall(b"more")
        assert not read_all(connection).startswith(b"HTTP")


def test_a_body_that_is_too_long_is_answered_and_the_connection_ends(brief: Served) -> None:
    head = post_bytes("/v1/completions", b"{", "authorization: Bearer k", length=1 << 30)
    with brief.connect() as connection:
        connection.sendall(head.replace(b"connection: close\r\n", b""))
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_a_connection_that_waits_is_closed_for_a_new_one(brief: Served) -> None:
    with ExitStack() as stack:
        waiting = [stack.enter_context(brief.connect()) for _ in range(4)]
        assert brief.raw(
            b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        ).startswith(b"HTTP/1.1 200")
        # The oldest was closed.
        assert waiting[0].recv(1) == b""


def test_a_connection_beyond_the_bound_is_refused_while_all_are_in_use(brief: Served) -> None:
    with ExitStack() as stack:
        # A request whose body is missing is in use.
        for _ in range(4):
            connection = stack.enter_context(brief.connect())
            headers = ("authorization: Bearer k", "expect: 100-continue")
            connection.sendall(post_bytes("/v1/completions", b"", *headers, length=100))
            assert connection.recv(100).startswith(b"HTTP/1.1 100")
        assert brief.raw(b"").startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize(
    "headers",
    [b"", b"host: localhost\r\nhost: localhost\r\n", b"host: [::1\r\n", b"host: a:b\r\n"],
    ids=["none", "two", "open bracket", "port"],
)
def test_a_request_has_one_host(served: Served, headers: bytes) -> None:
    head = b"GET /version HTTP/1.1\r\nconnection: close\r\n" + headers
    assert served.raw(head + b"\r\n").startswith(b"HTTP/1.1 400")


def test_an_old_request_needs_no_host(served: Served) -> None:
    assert served.raw(b"GET /version HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def client_names(gateway: Served, *heads: dict[str, str]) -> list[str]:
    for headers in heads:
        assert gateway.post("/v1/completions", {"prompt": "p"}, **headers).status_code == 200
    found = gateway.controller.requests(rq.Generate)
    return [request.client for request in found]


def test_clients_are_told_apart_by_key_header_or_address(tmp_path: Path) -> None:
    with StandIn(tmp_path) as controller:
        with serve_gateway(controller, api_keys=("one", "two"), client_header="X-User") as gateway:
            one, two, again = client_names(
                gateway,
                {"authorization": "Bearer one"},
                {"x-api-key": "two"},
                {"x-api-key": "one", "X-User": "else"},
            )
            assert one == again != two
            assert "one" not in one
        controller.received.clear()
        with serve_gateway(controller, client_header="X-User") as gateway:
            ada, bob, none, last = client_names(
                gateway, {"x-user": "ada"}, {"x-user": "bob"}, {}, {"x-user": "ada"}
            )
            assert len({ada, bob, none}) == 3
            assert ada == last
