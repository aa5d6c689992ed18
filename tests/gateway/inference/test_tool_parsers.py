"""Parsers of calls: each format, and that the division of a text never changes its parts."""

import json
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loradock.gateway.inference import tool_parsers as parsers
from loradock.gateway.inference.tool_formats import FORMATS, find_format
from loradock.gateway.inference.tool_parsers import (
    Blocks,
    ForcedArguments,
    ForcedCalls,
    FreeCalls,
    PlainText,
)
from loradock.gateway.options import AUTO_PARSER, GatewayOptions

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "places": {"type": ["array", "null"]},
        },
    },
    "time": {"type": "object"},
}
PARIS = '{"city": "Paris"}'
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
TIME = '{"name": "time", "parameters": {}}'
ELEMENTS = "\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"

# Format, and outputs that are text without calls.
TEXTS = {
    "hermes": (
        *("Hello <b>.", " \n ", " " * 200 + "x", "a <tool_call> b <tool_call> c"),
        *("<tool_call>{'a'}</tool_call>", f"a <tool_call>{CALL[:-3]}"),
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "time", "arguments": {"a": "\\ud800"}}</tool_call>',
        f"<tool_call>{'[' * 100_000}</tool_call>",
    ),
    "llama3_json": (f"See: {TIME}", '{"answer": 1}', "<|python_tag|>print(1)"),
    "mistral": ("[TOOL_CALLS]weather{", "[1] is [TOOL"),
    "qwen3_coder": (f"<tool_call>{CALL}</tool_call>",),
}

# Format, output, the text of the answer, and its calls.
OUTPUTS = [
    *((name, text, text, []) for name, texts in TEXTS.items() for text in texts),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", PARIS)]),
    ("hermes", f"I look.\n<tool_call>{CALL}</tool_call>\n", "I look.", [("weather", PARIS)]),
    (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{TIME}</tool_call>",
        "",
        [("weather", PARIS), ("time", "{}")],
    ),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done.", " Done.", [("weather", PARIS)]),
    # The end tag is missing, because it is the model's end token.
    ("hermes", f"<tool_call>{CALL}", "", [("weather", PARIS)]),
    (
        "hermes",
        f"<tool_call>[{CALL}, {TIME}]</tool_call>",
        "",
        [("weather", PARIS), ("time", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("time", '{"a": "x\\ny"}')],
    ),
    ("llama3_json", f"<|python_tag|>{TIME}", "", [("time", "{}")]),
    ("llama3_json", f" {TIME}; {CALL}", "", [("time", "{}"), ("weather", PARIS)]),
    ("llama3_json", f"See:<|python_tag|>{TIME}", "See:", [("time", "{}")]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {TIME}]", "", [("weather", PARIS), ("time", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather{PARIS}", "", [("weather", PARIS)]),
    (
        "mistral",
        f"Yes[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time[CALL_ID]a1B2c3D4e[ARGS]{{}}",
        "Yes",
        [("weather", PARIS), ("time", "{}")],
    ),
    ("qwen3_coder", f"<tool_call>{ELEMENTS}</tool_call>", "", [("weather", PARIS)]),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=days>3</parameter><parameter=metric>True"
        "</parameter><parameter=places>null</parameter><parameter=city>12</parameter>"
        "<parameter=more>5</parameter></function></tool_call>",
        "",
        [
            (
                "weather",
                '{"days": 3, "metric": true, "places": null, "city": "12", "more": "5"}',
            )
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=days>x</parameter></function></tool_call>",
        "",
        [("weather", '{"days": "x"}')],
    ),
]


def read(kind: Any, pieces: Any, *arguments: Any, **options: Any) -> Any:
    """Return the text and the calls of an output that arrives in pieces."""
    blocks = Blocks(lambda: "id")
    parser = kind(blocks, *arguments, **options)
    for piece in pieces:
        parser.add(piece)
    parser.finish()
    assert all(call.id == "id" for call in blocks.calls)
    return blocks.text, [(call.name, call.text) for call in blocks.calls]


def changes(blocks: Blocks) -> list[tuple[str, str, str]]:
    """Return the steps since the last call: their kinds, the blocks' kinds and the texts."""
    return [(step.kind, step.block.kind, step.text) for step in blocks.take_steps()]


@pytest.mark.parametrize(("name", "output", "text", "calls"), OUTPUTS)
def test_an_output_is_divided_into_text_and_calls(
    name: Any, output: Any, text: str, calls: Any
) -> None:
    assert read(FreeCalls, [output], FORMATS[name], SCHEMAS) == (text, calls)
    assert read(FreeCalls, output, FORMATS[name], SCHEMAS) == (text, calls)


PIECES = st.lists(
    st.sampled_from(
        (
            *("<tool_call>", "</tool_call>", "<tool", "_call>", "[TOOL_CALLS]", "<|python_tag|>"),
            *(CALL, TIME, ELEMENTS, " ", "\n", "x", "{", "}", "weather", PARIS, " " * 70),
        )
    ),
    max_size=8,
)


@given(name=st.sampled_from(sorted(FORMATS)), pieces=PIECES)
@example(name="hermes", pieces=["x", " " * 70, "<tool_call>", TIME, "</tool_call>", " " * 70])
def test_the_division_of_a_text_changes_nothing(name: Any, pieces: Any) -> None:
    output = "".join(pieces)
    of = (FORMATS[name], SCHEMAS)
    whole = read(FreeCalls, [output], *of)
    assert read(FreeCalls, pieces, *of) == read(FreeCalls, output, *of) == whole
    # What is no call is text: nothing but calls, their tags and spaces around these is missing.
    text, calls = whole
    if not calls:
        assert text == output
    first = read(FreeCalls, pieces, *of, parallel=False)
    assert first == (text, calls[:1])


def test_a_call_without_end_is_text_from_a_bound_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "CALL_CHARACTERS_MAX", 100)
    blocks = Blocks(lambda: "id")
    parser = FreeCalls(blocks, FORMATS["hermes"], SCHEMAS)
    parser.add("<tool_call>" + "x" * 90)
    assert changes(blocks) == []
    parser.add("y" * 20)
    text = "<tool_call>" + "x" * 90 + "y" * 20
    assert changes(blocks) == [("begin", "text", ""), ("more", "text", text)]
    parser.add(f"<tool_call>{TIME}</tool_call>")
    assert blocks.text == text
    assert [(call.name, call.text) for call in blocks.calls] == [("time", "{}")]


FORCED = [
    ('[{"name": "time", "parameters": {}}]', "", [("time", "{}")]),
    (
        '[ {"name" :"time",\n"parameters":{"a": "}]{\\"", "b": [{}]}} ,'
        '{"name": "weather", "parameters": {"city": "x"}}]',
        "",
        [("time", '{"a": "}]{\\"", "b": [{}]}'), ("weather", '{"city": "x"}')],
    ),
    # max_tokens ended it.
    ('[{"name": "time", "parameters": {"a": 1', "", [("time", '{"a": 1')]),
    ('[{"name": "time", "parameters": {}', "", [("time", "{}")]),
    ('[{"name": "ti', '[{"name": "ti', []),
    ('[{"name": "time", "parameters": {}}, {"na', ', {"na', [("time", "{}")]),
    ('[{"name": "a\\"b", "parameters": {}}]', "", [('a"b', "{}")]),
    ("", "", []),
]


@pytest.mark.parametrize(("output", "text", "calls"), FORCED)
def test_forced_calls_are_read_as_they_are_generated(output: Any, text: str, calls: Any) -> None:
    assert read(ForcedCalls, [output]) == read(ForcedCalls, output) == (text, calls)


def test_forced_arguments_are_not_held_back() -> None:
    blocks = Blocks(lambda: "id")
    parser = ForcedCalls(blocks)
    parser.add('[{"name": "time", "parameters": ')
    assert changes(blocks) == []
    parser.add('{"a"')
    assert changes(blocks) == [("begin", "call", ""), ("more", "call", '{"a"')]
    parser.add(": 1")
    assert changes(blocks) == [("more", "call", ": 1")]
    parser.add("}}]")
    assert changes(blocks) == [("more", "call", "}"), ("end", "call", "")]
    assert blocks.calls[0].name == "time"


def test_an_output_may_be_the_arguments_of_one_tool() -> None:
    assert read(ForcedArguments, ['{"a"', "", ": 1}"], "time") == ("", [("time", '{"a": 1}')])
    assert read(ForcedArguments, [], "time") == ("", [])
    assert read(PlainText, ["a", "", "b"]) == ("ab", [])


def test_the_format_is_the_one_that_a_template_shows() -> None:
    templates = {
        "hermes": '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}',
        "qwen3_coder": "<tool_call>\n<function={{ call.name }}>",
        "mistral": "{{ '[TOOL_CALLS]' + call }}",
        "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary}.',
        "": "<tool_call>{{ call.name }}\n<arg_key>",
    }
    assert {find_format(text): text for text in templates.values()} == templates
    assert find_format("{{ messages }}") == ""
    assert find_format("<|python_tag|>") == "llama3_json"


def test_the_option_has_the_formats() -> None:
    [option] = [
        field
        for field in msgspec.structs.fields(GatewayOptions)
        if field.name == "tool_call_parser"
    ]
    assert {*get_args(get_args(option.type)[0])} == {AUTO_PARSER, *FORMATS}


def test_arguments_are_json() -> None:
    for _, output, _, calls in OUTPUTS:
        assert all(isinstance(json.loads(text), dict) for _, text in calls), output
