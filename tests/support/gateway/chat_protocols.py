"""The three protocols of chats: how each asks, and what its answer tells, whole or as a stream."""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import openai

from tests.support.gateway.served import Served
from tests.support.waiting import HANG_S

MODEL = "upper"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


class Told(NamedTuple):
    """What an answer tells: its text, its calls as (id, name, arguments), and how it ended.

    `reason`: "stop", "calls" or "length". `tokens`: of the prompt and of the output.
    """

    text: str
    calls: list[tuple[str, str, Any]]
    reason: str
    tokens: tuple[int, int]


class Asked(NamedTuple):
    """A chat: what a user says after `system`, with one tool if `choice` is not empty.

    `choice`: "auto", "any", "named" or "none". `limit`: tokens; None: no limit that the protocol
    lets one leave out. `turns`: an earlier call of the tool and its result.
    """

    system: str = ""
    limit: int | None = None
    temperature: float | None = None
    choice: str = ""
    schema: Any = None
    image: bytes = b""
    has_result: bool = False
    model: str = MODEL


Ask = Callable[[Served, Asked], Told]
Events = Callable[[Served, Asked], Sequence[Any]]


class Protocol(NamedTuple):
    """A protocol: its path, its body of a chat, its readers, and its last event of a failure."""

    path: str
    body: Callable[[Asked], dict[str, Any]]
    whole: Ask
    streamed: Ask
    events: Events


def openai_client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", timeout=HANG_S, max_retries=0)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


# Chat Completions.

_FUNCTION = {"name": "weather", "parameters": SCHEMA}


def _chat_body(asked: Asked) -> dict[str, Any]:
    content: Any = "hi"
    if asked.image:
        content = [
            {"type": "text", "text": "hi"},
            {"type": "image_url", "image_url": {"url": _url(asked.image)}},
        ]
    messages: list[Any] = [{"role": "user", "content": content}]
    if asked.system:
        messages.insert(0, {"role": "system", "content": asked.system})
    if asked.has_result:
        called = {"name": "weather", "arguments": '{"city": "Paris"}'}
        call = {"id": "t", "type": "function", "function": called}
        messages += [
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "tool_call_id": "t"},
        ]
    named = {"type": "function", "function": {"name": "weather"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked.schema}}
    return {
        "model": asked.model,
        "messages": messages,
        **_given(
            max_completion_tokens=asked.limit,
            temperature=asked.temperature,
            tools=[{"type": "function", "function": _FUNCTION}] if asked.choice else None,
            tool_choice={"any": "required", "named": named}.get(asked.choice, asked.choice),
            parallel_tool_calls=False if asked.choice in ("any", "named") else None,
            response_format=form if asked.schema else None,
        ),
    }


def _chat_told(answer: Any) -> Told:
    [choice] = answer.choices
    calls = [
        (call.id, call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or ()
    ]
    reason = {"tool_calls": "calls"}.get(choice.finish_reason, choice.finish_reason)
    usage = answer.usage
    return Told(
        choice.message.content or "", calls, reason, (usage.prompt_tokens, usage.completion_tokens)
    )


def _chat_whole(served: Served, asked: Asked) -> Told:
    with openai_client(served) as client:
        return _chat_told(client.chat.completions.create(**_chat_body(asked)))


def _chat_streamed(served: Served, asked: Asked) -> Told:
    with openai_client(served) as client:
        state: Any = client.chat.completions.stream(
            **_chat_body(asked), stream_options={"include_usage": True}
        )
        with state as stream:
            for _ in stream:
                pass
            return _chat_told(stream.current_completion_snapshot)


def _chat_events(served: Served, asked: Asked) -> Sequence[Any]:
    *events, _ = served.events("/v1/chat/completions", {**_chat_body(asked), "stream": True})
    return [json.loads(event) for event in events]


# Responses.


def _responses_body(asked: Asked) -> dict[str, Any]:
    content: Any = "hi"
    if asked.image:
        content = [
            {"type": "input_text", "text": "hi"},
            {"type": "input_image", "image_url": _url(asked.image), "detail": "auto"},
        ]
    items: list[Any] = [{"role": "user", "content": content}]
    if asked.has_result:
        call = {"call_id": "t", "name": "weather", "arguments": '{"city": "Paris"}'}
        items += [
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": "t", "output": "sunny"},
        ]
    named = {"type": "function", "name": "weather"}
    form = {"format": {"type": "json_schema", "name": "x", "schema": asked.schema}}
    return {
        "model": asked.model,
        "input": items,
        **_given(
            instructions=asked.system,
            max_output_tokens=asked.limit,
            temperature=asked.temperature,
            tools=[{"type": "function", "strict": True, **_FUNCTION}] if asked.choice else None,
            tool_choice={"any": "required", "named": named}.get(asked.choice, asked.choice),
            parallel_tool_calls=False if asked.choice in ("any", "named") else None,
            text=form if asked.schema else None,
        ),
    }


def _responses_told(answer: Any) -> Told:
    calls = [
        (item.call_id, item.name, json.loads(item.arguments))
        for item in answer.output
        if item.type == "function_call"
    ]
    if len({item.id for item in answer.output}) < len(answer.output):
        raise AssertionError("two items have one id")
    reason = "calls" if calls else "stop"
    if answer.status == "incomplete":
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[-1].status == "incomplete"
        reason = "length"
    usage = answer.usage
    return Told(answer.output_text, calls, reason, (usage.input_tokens, usage.output_tokens))


def _responses_whole(served: Served, asked: Asked) -> Told:
    with openai_client(served) as client:
        return _responses_told(client.responses.create(**_responses_body(asked)))


def _responses_streamed(served: Served, asked: Asked) -> Told:
    """Return what the client accumulates, after a look at the events' order."""
    with openai_client(served) as client:
        state: Any = client.responses.stream(**_responses_body(asked))
        with state as stream:
            events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[-1] in ("response.completed", "response.incomplete")
    added = kinds.count("response.output_item.added")
    assert added == kinds.count("response.output_item.done") == len(events[-1].response.output)
    _check_pieces(events)
    return _responses_told(events[-1].response)


def _check_pieces(events: Any) -> None:
    """Check that items begin empty, and that their pieces make what they end with."""
    pieces: dict[int, str] = {}
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


def _responses_events(served: Served, asked: Asked) -> Sequence[Any]:
    return named_events(served, "/v1/responses", _responses_body(asked))


# Messages.


def _messages_body(asked: Asked) -> dict[str, Any]:
    content: Any = "hi"
    if asked.image:
        data = base64.b64encode(asked.image).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "text", "text": "hi"}, {"type": "image", "source": source}]
    messages: list[Any] = [{"role": "user", "content": content}]
    if asked.has_result:
        use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Paris"}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "sunny"}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
            {"role": "user", "content": [result]},
        ]
    choice = {"named": {"type": "tool", "name": "weather"}}.get(
        asked.choice, {"type": asked.choice}
    )
    if asked.choice in ("any", "named"):
        choice["disable_parallel_tool_use"] = True  # type: ignore[assignment]
    return {
        "model": asked.model,
        "max_tokens": asked.limit or 50,
        "messages": messages,
        **_given(
            system=asked.system,
            temperature=asked.temperature,
            tools=[{"name": "weather", "input_schema": SCHEMA}] if asked.choice else None,
            tool_choice=choice if asked.choice else None,
            output_config=_messages_form(asked),
        ),
    }


def _messages_form(asked: Asked) -> Any:
    return asked.schema and {"format": {"type": "json_schema", "schema": asked.schema}}


_MESSAGE_REASONS = {"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}


def _messages_told(message: Any) -> Told:
    blocks = message["content"]
    calls = [(one["id"], one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    text = "".join([one["text"] for one in blocks if one["type"] == "text"])
    usage = message["usage"]
    tokens = (usage["input_tokens"], usage["output_tokens"])
    return Told(text, calls, _MESSAGE_REASONS[message["stop_reason"]], tokens)


def _messages_whole(served: Served, asked: Asked) -> Told:
    return _messages_told(served.post("/v1/messages", _messages_body(asked)).json())


def _messages_streamed(served: Served, asked: Asked) -> Told:
    return _messages_told(message_of(_messages_events(served, asked)))


def message_of(events: Any) -> Any:
    """Return the message that a client accumulates from events."""
    message = events[0]["message"]
    inputs: dict[int, str] = {}
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                index = event["index"]
                inputs[index] = inputs.get(index, "") + event["delta"]["partial_json"]
            case "content_block_stop" if event["index"] in inputs:
                index = event["index"]
                message["content"][index]["input"] = json.loads(inputs[index])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    return message


def _messages_events(served: Served, asked: Asked) -> Sequence[Any]:
    return named_events(served, "/v1/messages", _messages_body(asked))


def named_events(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream, each after its name."""
    with served.http.stream("POST", path, json={**body, "stream": True}) as response:
        text = "".join(response.iter_text())
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


PROTOCOLS = {
    "chat": Protocol("/v1/chat/completions", _chat_body, _chat_whole, _chat_streamed, _chat_events),
    "responses": Protocol(
        "/v1/responses", _responses_body, _responses_whole, _responses_streamed, _responses_events
    ),
    "messages": Protocol(
        "/v1/messages", _messages_body, _messages_whole, _messages_streamed, _messages_events
    ),
}
