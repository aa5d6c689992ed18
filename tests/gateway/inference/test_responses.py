"""The Responses protocol, used by the `openai` client: whole answers, events, tools, refusals."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import MultimodalPrompt
from tests.support.gateway.outputs import generate, only_generation, prompt, refuse, sampling
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


def streamed(client: Any, **fields: Any) -> Any:
    """Return the answer as the client accumulates it, after a look at the events' order."""
    with client.responses.stream(**{"model": "upper", "input": "hi"} | fields) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[-1] in ("response.completed", "response.incomplete")
    added = kinds.count("response.output_item.added")
    assert added == kinds.count("response.output_item.done") == len(events[-1].response.output)
    check_pieces(events)
    return events[-1].response


def check_pieces(events: Any) -> None:
    """Check that items begin empty, and that their pieces make what they end with."""
    pieces = {}
    for event in events:
        match event.type:
            case "response.output_item.added":
                pieces[event.output_index] = ""
                assert not getattr(event.item, "content", None)
                assert not getattr(event.item, "arguments", None)
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                pieces[event.output_index] += event.delta
            case "response.output_text.done":
                assert event.text == pieces[event.output_index]
            case "response.function_call_arguments.done":
                assert event.arguments == pieces[event.output_index]


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_text(hermes: Served, client: Any, read: Any) -> None:
    generate(hermes, "Hello.")
    answer = read(client, instructions="Be kind.", max_output_tokens=9, temperature=0.5)
    assert (answer.output_text, answer.status, answer.model) == ("Hello.", "completed", "upper")
    assert answer.id.startswith("resp_")
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (4, 2, 6)
    assert (answer.instructions, answer.max_output_tokens) == ("Be kind.", 9)
    assert prompt(hermes) == "<system>Be kind.<user>hi<assistant>"
    assert (sampling(hermes).max_tokens, sampling(hermes).temperature) == (9, 0.5)


@pytest.mark.parametrize("read", [whole, streamed])
def test_calls_of_tools(hermes: Served, client: Any, read: Any) -> None:
    generate(hermes, f"I look.\n{CALL}\n{CALL}")
    answer = read(client, tools=TOOLS)
    message, first, second = answer.output
    assert message.content[0].text == "I look."
    for call in (first, second):
        assert (call.type, call.name, call.arguments) == (
            "function_call",
            "weather",
            '{"city": "Paris"}',
        )
    assert first.call_id != second.call_id
    assert first.id != second.id


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize(
    ("choice", "output"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Rome"}}]'),
        (FUNCTION, '{"city": "Rome"}'),
    ],
)
def test_a_call_can_be_forced(
    hermes: Served, client: Any, read: Any, choice: Any, output: Any
) -> None:
    generate(hermes, output)
    answer = read(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    [call] = answer.output
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    assert sampling(hermes).structure is not None


def test_an_answer_is_parsed(hermes: Served, client: Any) -> None:
    generate(hermes, '{"city": "Rome"}')
    answer = client.responses.parse(model="upper", input="hi", text_format=City)
    with client.responses.stream(model="upper", input="hi", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    assert answer.output_parsed == City(city="Rome")
    for request in hermes.controller.requests(rq.Generate):
        schema = json.loads(request.sampling.structure.text)
        assert schema["properties"]["city"]["enum"] == ["Paris", "Rome"]


@pytest.mark.parametrize("read", [whole, streamed])
def test_an_answer_that_is_cut_off_is_incomplete(hermes: Served, client: Any, read: Any) -> None:
    generate(hermes, "abc", "length")
    answer = read(client)
    assert (answer.status, answer.output_text) == ("incomplete", "abc")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


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


def test_images_have_their_place(served: Served) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,cG5n", "detail": "auto"}
    content = [{"type": "input_text", "text": "see "}, image]
    served.post(PATH, {"input": [{"role": "user", "content": content}]})
    assert only_generation(served).prompt == MultimodalPrompt(
        "<user>see <image><assistant>", (b"png",)
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
