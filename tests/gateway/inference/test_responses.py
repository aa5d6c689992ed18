"""The Responses protocol, used by the `openai` client: whole answers, events, tools, refusals."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.gateway.outputs import generate, prompt, refuse
from tests.support.gateway.served import Served

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
FUNCTION = {"type": "function", "name": "weather"}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def whole(client: Any, **fields: Any) -> Any:
    return client.responses.create(**{"model": "upper", "input": "hi"} | fields)


def test_an_answer_repeats_its_request(hermes: Served, client: Any) -> None:
    generate(hermes, "Hello.")
    answer = whole(client, instructions="Be kind.", max_output_tokens=9)
    assert (answer.output_text, answer.status, answer.model) == ("Hello.", "completed", "upper")
    assert answer.id.startswith("resp_")
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.usage.total_tokens == 6
    assert (answer.instructions, answer.max_output_tokens) == ("Be kind.", 9)


def test_an_answer_is_parsed(hermes: Served, client: Any) -> None:
    generate(hermes, '{"city": "Rome"}')
    answer = client.responses.parse(model="upper", input="hi", text_format=City)
    with client.responses.stream(model="upper", input="hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    assert answer.output_parsed == City(city="Rome")
    for request in hermes.controller.requests(rq.Generate):
        schema = json.loads(request.sampling.structure.text)
        assert schema["properties"]["city"]["enum"] == ["Paris", "Rome"]


def test_earlier_items_are_sent_again(hermes: Served, client: Any) -> None:
    generate(hermes, f"I look.\n{CALL}")
    answer = whole(client, tools=TOOLS)
    hermes.controller.received.clear()
    generate(hermes, "Sunny.")
    call = answer.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *answer.output,
        result,
    ]
    assert whole(client, instructions="Be kind.", input=items).output_text == "Sunny."
    shown = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    assert prompt(hermes) == (
        f"<system>Be kind.\n\nBe brief.<user>hi<assistant>I look.{shown}<tool>sunny<assistant>"
    )


@pytest.mark.parametrize("store", [True, False])
def test_nothing_is_stored(hermes: Served, client: Any, store: bool) -> None:
    answer = whole(client, store=store, metadata={"a": "b"}, user="u", truncation="disabled")
    assert answer.model_dump()["store"] is False
    assert answer.metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "response_format"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_not_served_is_refused_by_name(hermes: Served, fields: Any, param: Any) -> None:
    assert hermes.refused(PATH, {"input": "hi", **fields})["param"] == param
    assert hermes.controller.requests(rq.Generate) == []


def test_a_failure_after_the_first_token_is_an_event(hermes: Served, client: Any) -> None:
    refuse(hermes, ErrorCode.ENGINE_GONE, after_one_token=True)
    *_, last = client.responses.create(model="upper", input="hi", stream=True)
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert last.response.error.message.startswith("L011")
