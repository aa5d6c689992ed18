"""Chats in Anthropic's protocol: what templates read of a request, answers, events and errors."""

from typing import Any

import pytest

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.gateway.chat_protocols import SCHEMA, message_of, named_events
from tests.support.gateway.outputs import (
    generate,
    prompt,
    refuse,
    sampling,
)
from tests.support.gateway.served import Served

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {
    "model": "upper",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOLS = [{"name": "weather", "description": "now", "input_schema": SCHEMA}]


def events(served: Served, **fields: Any) -> Any:
    return named_events(served, PATH, {**BODY, **fields})


def whole(served: Served, **fields: Any) -> Any:
    return served.post(PATH, {**BODY, **fields}).json()


def streamed(served: Served, **fields: Any) -> Any:
    return message_of(events(served, **fields))


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_message(hermes: Served, read: Any) -> None:
    generate(hermes, "Hello.")
    message = read(hermes, top_k=3, top_p=0.5)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "upper")
    assert message["id"].startswith("msg_")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert (sampling(hermes).top_k, sampling(hermes).top_p) == (3, 0.5)


@pytest.mark.parametrize("read", [whole, streamed])
def test_how_a_message_ended(hermes: Served, read: Any) -> None:
    generate(hermes, "abc", "length")
    assert read(hermes)["stop_reason"] == "max_tokens"

    def stop(request: Any) -> Any:
        text = rq.TokensStreamed(
            request.request_id, 0, (1,), "a", finish_reason="stop", stop_reason="END"
        )
        hermes.controller.extra_replies.append(text)
        hermes.controller.output = ()
        return rq.GenerationDone(request.request_id, request.adapter, "stop", 4, 1)

    hermes.controller.answers[rq.Generate] = stop
    message = read(hermes, stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_a_forced_use_that_is_cut_off_is_shown(hermes: Served) -> None:
    generate(hermes, '{"city": "Ro', "length")
    message = whole(hermes, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert message["content"] == [{"type": "text", "text": '{"city": "Ro'}]
    assert message["stop_reason"] == "max_tokens"


def test_the_template_reads_uses_and_results(hermes: Served) -> None:
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Paris"}}
    text = {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{**text, "text": "sunny"}]}
    messages = [
        *BODY["messages"],
        {"role": "assistant", "content": [text, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    whole(hermes, messages=messages, system=[text])
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    assert prompt(hermes) == (
        f"<system>I look.<user>hi<assistant>I look.{call}<tool>sunny<user>so?<assistant>"
    )


def test_a_last_message_of_the_assistant_is_continued(hermes: Served) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": "Well,"}]
    whole(hermes, messages=messages)
    assert prompt(hermes) == "<user>hi<assistant>Well,"


def test_tokens_are_counted(hermes: Served) -> None:
    body = {"model": "upper", "messages": BODY["messages"], "system": "Be kind."}
    answer = hermes.post(COUNT, body).json()
    assert answer == {"input_tokens": len("<system>Be kind.<user>hi<assistant>")}
    assert hermes.controller.requests(rq.Generate) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
def test_what_is_not_served_is_refused_in_the_shape_of_the_protocol(
    hermes: Served, fields: Any, named: str
) -> None:
    response = hermes.post(PATH, {**BODY, **fields})
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]


def test_an_unknown_model_and_an_absent_engine_have_their_types(hermes: Served) -> None:
    assert (
        hermes.refused(PATH, {**BODY, "model": "unknown"}, status=404)["type"] == "not_found_error"
    )
    refuse(hermes, ErrorCode.ENGINE_GONE)
    response = hermes.post(PATH, BODY)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "overloaded_error"
    assert response.headers["retry-after"]


def test_an_error_after_the_first_token_is_an_event(hermes: Served) -> None:
    refuse(hermes, ErrorCode.ENGINE_GONE, after_one_token=True)
    *_, last = events(hermes)
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
