"""Prompts that are too long, as `openai` reports them, and prompts shortened on request."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import PROMPT_CHARACTERS_MAX, PROMPT_TOKENS_MAX, Truncation
from tests.support.gateway.served import Served

CHAT = [{"role": "user", "content": "hi"}]
RENDERED = b"<user>hi<assistant>"
LONG = "x" * (PROMPT_CHARACTERS_MAX + 1)
IDS = [1] * (PROMPT_TOKENS_MAX + 1)
REFUSAL = (
    "this model's maximum context length is 512 tokens, and the prompt is too long: 600 tokens"
)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


CALLS: dict[str, Callable[..., Any]] = {
    "completion": lambda client, **more: client.completions.create(
        model="upper", prompt="hello", **more
    ),
    "chat": lambda client, **more: client.chat.completions.create(
        model="upper", messages=CHAT, **more
    ),
    "embedding": lambda client, **_: client.embeddings.create(model="upper", input="hello"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_has_the_code_of_openai(
    served: Served, client: Any, call: Any, stream: bool
) -> None:
    for kind in (rq.Generate, rq.Embed):
        served.controller.answers[kind] = lambda request: rq.Refused(
            request.request_id, ErrorCode.CONTEXT_EXCEEDED, REFUSAL
        )
    with pytest.raises(openai.BadRequestError) as caught:
        CALLS[call](client, stream=stream)
    error = caught.value
    assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 512 tokens" in error.message
    assert "prompt is too long" in error.message
    assert error.response.headers["x-loradock-code"] == "L019"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": IDS}, "prompt"),
        ("/v1/completions", {"prompt": [IDS]}, "prompt"),
        ("/v1/completions", {"prompt": LONG, "add_special_tokens": False}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 300_000}]},
            "messages",
        ),
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": [IDS]}, "input"),
        ("/classify", {"input": ["a", LONG]}, "input"),
        ("/pooling", {"input": LONG}, "input"),
        ("/score", {"text_1": LONG, "text_2": "a"}, "text_1"),
        ("/rerank", {"query": "a", "documents": [LONG]}, "documents"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_prompt_that_is_never_sent_is_refused_alike(
    served: Served, path: Any, body: Any, param: Any
) -> None:
    response = served.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 512 tokens" in error["message"]
    assert "prompt is too long" in error["message"]
    sent = (rq.Generate, rq.Embed, rq.Classify)
    assert not any(served.controller.requests(kind) for kind in sent)


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"truncate_prompt_tokens": 3}, b"def"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 6}, b"abcdef"),
        ({"truncate_prompt_tokens": -1}, b"abcdef"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 508}, b"cdef"),
    ],
)
def test_a_prompt_is_shortened_on_request(served: Served, more: Any, sent: Any) -> None:
    for prompt in ("abcdef", list(b"abcdef")):
        served.controller.received.clear()
        assert served.post("/v1/completions", {"prompt": prompt, **more}).status_code == 200
        [request] = served.controller.requests(rq.Generate)
        assert bytes(request.prompt) == sent


def test_a_chat_is_shortened_and_the_answer_fills_the_rest(served: Served) -> None:
    body = {"messages": CHAT, "truncate_prompt_tokens": 5}
    assert served.post("/v1/chat/completions", body).status_code == 200
    [request] = served.controller.requests(rq.Generate)
    assert bytes(request.prompt) == RENDERED[-5:]
    assert request.sampling.max_tokens == 512 - 5


def test_an_echo_of_a_shortened_prompt_is_what_was_read(served: Served) -> None:
    body = {"prompt": "abcdef", "echo": True, "truncate_prompt_tokens": 2}
    assert served.post("/v1/completions", body).json()["choices"][0]["text"] == "efone"


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/embeddings", {"input": "a"}, rq.Embed),
        ("/pooling", {"input": "a"}, rq.Embed),
        ("/classify", {"input": "a"}, rq.Classify),
        ("/score", {"text_1": "a", "text_2": "b"}, rq.Embed),
        ("/rerank", {"query": "a", "documents": "b"}, rq.Embed),
    ],
)
def test_the_engine_shortens_inputs_which_it_adds_tokens_to(
    served: Served, path: Any, body: Any, kind: Any
) -> None:
    for more, truncation in (
        ({}, None),
        ({"truncate_prompt_tokens": -1}, Truncation(0, "right")),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, Truncation(7, "left")),
    ):
        served.controller.received.clear()
        assert served.post(path, {**body, **more}).status_code == 200
        [request] = served.controller.requests(kind)
        assert request.truncation == truncation


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_a_length_of_zero_is_refused(served: Served, path: Any) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT}
    body = {"input": "a"} if path == "/v1/embeddings" else body
    assert (
        served.refused(path, {**body, "truncate_prompt_tokens": 0})["param"]
        == "truncate_prompt_tokens"
    )
