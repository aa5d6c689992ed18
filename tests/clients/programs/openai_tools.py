"""Calls of tools with `openai`: in chats and responses, free and forced, whole and as streams."""

import json
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

MODEL = "caller"
HELLO = [{"role": "user", "content": "hello"}]
WORD = {
    "type": "object",
    "properties": {"word": {"enum": ["hello", "adapter"]}},
    "required": ["word"],
    "additionalProperties": False,
}
REVERSE = {"name": "reverse", "description": "Reads a word backwards.", "parameters": WORD}
CHAT = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 200,
    "tools": [{"type": "function", "function": REVERSE}],
}
RESPONSE = {
    "model": MODEL,
    "temperature": 0,
    "max_output_tokens": 200,
    "tools": [{"type": "function", **REVERSE}],
}
CHOICES = ("required", {"type": "function", "function": {"name": "reverse"}})


class Verdict(BaseModel, extra="forbid"):
    kind: Literal["noun", "greeting"]


def called(call: object) -> str:
    """Return what the tool answers to a call."""
    assert call.name == "reverse", call
    return json.loads(call.arguments)["word"][::-1]


def use_chats(client: OpenAI) -> None:
    """Let the model call a tool, and repeat what it returned."""
    [choice] = client.chat.completions.create(messages=HELLO, **CHAT).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    [call] = choice.message.tool_calls
    assert called(call.function) == "olleh"
    result = {"role": "tool", "tool_call_id": call.id, "content": "olleh"}
    [choice] = client.chat.completions.create(
        messages=[*HELLO, choice.message, result], **CHAT
    ).choices
    assert (choice.message.content, choice.finish_reason) == ("olleh", "stop")
    with client.chat.completions.stream(messages=HELLO, **CHAT) as stream:
        kinds = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert [called(one.function) for one in choice.message.tool_calls] == ["olleh"]
    for tool_choice in CHOICES:
        forced = {**CHAT, "messages": HELLO, "tool_choice": tool_choice}
        forced["parallel_tool_calls"] = False
        [choice] = client.chat.completions.create(**forced).choices
        [call] = choice.message.tool_calls
        assert called(call.function)
        assert choice.finish_reason == "tool_calls"
        with client.chat.completions.stream(**forced) as stream:
            stream.until_done()
            [choice] = stream.get_final_completion().choices
        assert [one.function.arguments for one in choice.message.tool_calls] == [
            call.function.arguments
        ]


def use_responses(client: OpenAI) -> None:
    """The same in the protocol of responses."""
    answer = client.responses.create(input="hello", **RESPONSE)
    [call] = answer.output
    assert called(call) == "olleh"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "olleh"}
    answer = client.responses.create(input=[*HELLO, *answer.output, result], **RESPONSE)
    assert answer.output_text == "olleh"
    assert answer.usage.output_tokens > 0
    with client.responses.stream(input="hello", **RESPONSE) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds, kinds
    assert called(call) == "olleh"
    for tool_choice in ("required", {"type": "function", "name": "reverse"}):
        forced = {**RESPONSE, "tool_choice": tool_choice, "parallel_tool_calls": False}
        [call] = client.responses.create(input="hello", **forced).output
        assert called(call)
    parsed = client.responses.parse(
        model=MODEL, input="hello", text_format=Verdict, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, Verdict)


with OpenAI(base_url=os.environ["TOOLS_BASE_URL"], api_key=os.environ["API_KEY"]) as opened:
    use_chats(opened)
    use_responses(opened)
