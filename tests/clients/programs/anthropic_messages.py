"""anthropic: messages, tools, streams, counts and errors, with the key in `x-api-key`."""

import os

import anthropic

# The client knows the temperature no more; the protocol does.
GREEDY = {"temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]
WORD = {
    "type": "object",
    "properties": {"word": {"enum": ["hello", "adapter"]}},
    "required": ["word"],
    "additionalProperties": False,
}
CALLER = {
    "model": "caller",
    "max_tokens": 200,
    "extra_body": GREEDY,
    "tools": [{"name": "reverse", "description": "Reads backwards.", "input_schema": WORD}],
}
client = anthropic.Anthropic(
    base_url=os.environ["TOOLS_BASE_URL"].removesuffix("/v1"),
    api_key=os.environ["API_KEY"],
    max_retries=0,
)

text = {"model": "reverse", "max_tokens": 16, "messages": HELLO, "extra_body": GREEDY}
message = client.messages.create(**text)
assert (message.content[0].text, message.stop_reason) == ("olleh", "end_turn")
assert message.usage.output_tokens > 0
with client.messages.stream(**text) as stream:
    assert "".join(stream.text_stream) == "olleh"
    assert stream.get_final_message().usage == message.usage
assert client.messages.create(**{**text, "max_tokens": 2}).stop_reason == "max_tokens"
stopped = client.messages.create(**text, stop_sequences=["l"])
assert (stopped.content[0].text, stopped.stop_sequence) == ("o", "l")
counted = client.messages.count_tokens(model="reverse", messages=HELLO)
assert counted.input_tokens == message.usage.input_tokens

message = client.messages.create(messages=HELLO, **CALLER)
assert message.stop_reason == "tool_use"
[use] = message.content
assert (use.name, use.input) == ("reverse", {"word": "hello"})
result = {"type": "tool_result", "tool_use_id": use.id, "content": "olleh"}
history = [*HELLO, {"role": "assistant", "content": message.content}]
history.append({"role": "user", "content": [result]})
assert client.messages.create(messages=history, **CALLER).content[0].text == "olleh"
with client.messages.stream(messages=HELLO, **CALLER) as stream:
    [use] = stream.get_final_message().content
assert use.input == {"word": "hello"}
for choice in ({"type": "any"}, {"type": "tool", "name": "reverse"}):
    forced = {**CALLER, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    [use] = client.messages.create(messages=HELLO, **forced).content
    assert use.input["word"] in WORD["properties"]["word"]["enum"]
    with client.messages.stream(messages=HELLO, **forced) as stream:
        assert stream.get_final_message().content[0].input == use.input

for wrong, kind in (
    ({"model": "missing"}, anthropic.NotFoundError),
    ({"max_tokens": 0}, anthropic.BadRequestError),
):
    try:
        client.messages.create(**{**text, **wrong})
        raise AssertionError(f"{wrong} must be refused")
    except kind as error:
        assert error.body["type"] == "error"
try:
    client.with_options(api_key="wrong").messages.create(**text)
    raise AssertionError("a wrong key must be refused")
except anthropic.AuthenticationError:
    pass
