"""Calls of tools in chats: free and forced, whole and streamed, read by the `openai` client."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from loradock.messages import requests as rq
from tests.support.gateway.outputs import generate, prompt, structure
from tests.support.gateway.served import Served, data_of, model_directory, serve_gateway
from tests.support.simulation.standin_controller import StandIn

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "time", "description": "Now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather"}}


def whole(client: Any, **fields: Any) -> Any:
    """Return the only choice of a chat."""
    [choice] = client.chat.completions.create(model="upper", messages=HELLO, **fields).choices
    return choice


def streamed(client: Any, **fields: Any) -> Any:
    """Return the only choice of a chat as the client accumulates its stream."""
    with client.chat.completions.stream(model="upper", messages=HELLO, **fields) as stream:
        events = list(stream)
        [choice] = stream.get_final_completion().choices
    ends = [one for one in events if one.type == "tool_calls.function.arguments.done"]
    assert len(ends) == len(choice.message.tool_calls or ())
    return choice


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize(
    ("output", "fields"),
    [
        ("No tool is needed.", {"tools": TOOLS, "tool_choice": "auto"}),
        ('<tool_call>{"name": weather}</tool_call>', {"tools": TOOLS}),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', {"tools": TOOLS}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}),
        (CALL, {}),
    ],
)
def test_what_is_no_call_is_content(
    hermes: Served, client: Any, read: Any, output: Any, fields: Any
) -> None:
    generate(hermes, output)
    choice = read(client, **fields)
    assert (choice.message.content, choice.finish_reason) == (output, "stop")
    assert not choice.message.tool_calls


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_that_is_cut_off_is_content(hermes: Served, client: Any, read: Any) -> None:
    generate(hermes, f"a {CALL[:-20]}", "length")
    if read is streamed:
        # The client refuses to parse what the length cut off.
        with pytest.raises(openai.LengthFinishReasonError) as raised:
            read(client, tools=TOOLS)
        [choice] = raised.value.completion.choices
    else:
        choice = read(client, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (f"a {CALL[:-20]}", "length")


@pytest.mark.parametrize("read", [whole, streamed])
def test_the_first_of_several_calls_is_answered_without_parallel_ones(
    hermes: Served, client: Any, read: Any
) -> None:
    generate(hermes, CALL + CALL)
    choice = read(client, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == [("weather", '{"city": "Paris"}')]


@pytest.mark.parametrize("read", [whole, streamed])
def test_some_call_can_be_forced(hermes: Served, client: Any, read: Any) -> None:
    generate(hermes, '[{"name": "weather", "parameters": {"city": "Rome"}}]')
    choice = read(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert calls_of(choice) == [("weather", '{"city": "Rome"}')]
    assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
    schema = json.loads(structure(hermes).text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["weather", "time"]
    # References stay within the schema that they were written in.
    assert schema["$defs"]["0"]["properties"]["city"]["$ref"] == "#/$defs/0/$defs/City"
    assert schema["$defs"]["0"]["$defs"]["City"] == {"enum": ["Paris", "Rome"]}


def test_forced_arguments_are_streamed_as_they_are_generated(hermes: Served) -> None:
    generate(hermes, '{"city": "Rome"}', characters=8)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": WEATHER, "stream": True}
    deltas = [chunk["choices"][0]["delta"] for chunk in data_of(hermes.events(PATH, body))]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 0]
    assert calls[0]["function"]["name"] == "weather"
    assert [call["function"]["arguments"] for call in calls] == ['{"city":', ' "Rome"}']


def test_a_forced_call_precedes_the_format_of_messages(hermes: Served, client: Any) -> None:
    generate(hermes, '{"city": "Rome"}')
    form = {"type": "json_object"}
    choice = whole(client, tools=TOOLS, tool_choice=WEATHER, response_format=form)
    assert calls_of(choice) == [("weather", '{"city": "Rome"}')]
    with pytest.raises(openai.BadRequestError, match="response_format applies to"):
        whole(client, tools=TOOLS, response_format=form)


@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_a_schema_of_any_depth_is_served_or_refused(hermes: Served, choice: Any) -> None:
    """At other depths other functions recurse too often."""
    statuses = set()
    for depth in range(0, 480, 30):
        schema: dict[str, Any] = {}
        for _ in range(depth):
            schema = {"properties": {"a": schema}}
        tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
        body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
        statuses.add(hermes.post(PATH, body).status_code)
    assert statuses <= {200, 400}


def test_names_of_tools_differ(hermes: Served) -> None:
    error = hermes.refused(PATH, {"messages": HELLO, "tools": TOOLS + TOOLS})
    assert "'weather' twice" in error["message"]


def test_each_choice_has_its_calls(hermes: Served, client: Any) -> None:
    generate(hermes, CALL)
    answer = client.chat.completions.create(model="upper", messages=HELLO, tools=TOOLS, n=2)
    assert [calls_of(choice) for choice in answer.choices] == [
        [("weather", '{"city": "Paris"}')]
    ] * 2


def test_the_template_reads_calls_and_their_results(hermes: Served, client: Any) -> None:
    generate(hermes, CALL)
    message = whole(client, tools=TOOLS).message
    hermes.controller.received.clear()
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    generate(hermes, "It is sunny.")
    messages = [*HELLO, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="upper", messages=messages)
    assert answer.choices[0].message.content == "It is sunny."
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    assert prompt(hermes) == f"<user>hi<assistant>{call}<tool>sunny<assistant>"


def test_log_probabilities_accompany_calls(hermes: Served, client: Any) -> None:
    generate(hermes, CALL)
    tokens = len(CALL) // 3 + 1
    assert len(whole(client, tools=TOOLS, logprobs=True).logprobs.content) == tokens
    assert len(streamed(client, tools=TOOLS, logprobs=True).logprobs.content) == tokens


@pytest.mark.parametrize(
    ("option", "special", "skips"),
    [("hermes", False, True), ("hermes", True, False), ("llama3_json", True, True)],
)
def test_special_tokens_that_are_tags_have_a_text(
    tmp_path: Path, option: Any, special: bool, skips: Any
) -> None:
    model = model_directory(tmp_path)
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    tag = {**vocabulary["added_tokens"][0], "id": 259, "content": "<tool_call>"}
    vocabulary["added_tokens"].append({**tag, "special": special})
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller, model=str(model), tool_call_parser=option) as served,
    ):
        body = {"messages": HELLO, "tools": TOOLS}
        assert served.post(PATH, body).status_code == 200
        served.post(PATH, {**body, "tool_choice": "none"})
        free, none = controller.requests(rq.Generate)
    assert (free.sampling.skip_special_tokens, none.sampling.skip_special_tokens) == (skips, True)


def test_ids_are_those_that_templates_of_mistral_accept(tmp_path: Path) -> None:
    model = model_directory(tmp_path)
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller, model=str(model), tool_call_parser="mistral") as served,
    ):
        generate(served, "[TOOL_CALLS]time{}")
        answer = served.post(PATH, {"messages": HELLO, "tools": TOOLS}).json()
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
