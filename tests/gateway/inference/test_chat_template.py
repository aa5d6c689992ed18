"""Chat templates: equal to those that transformers renders, and harmless."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from loradock.gateway.inference.chat_template import ChatTemplate, TemplateError, _answer
from loradock.gateway.inference.model_files import read_model_files
from loradock.gateway.inference.prompts import Message, TextPart, conversation_of
from loradock.gateway.inference.tokenizer import Tokenizer
from loradock.messages.prompts import PROMPT_CHARACTERS_MAX
from tests.support.gateway.served import CHAT_TEMPLATE, model_directory

CHATML = """\
{{ bos_token }}{% for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|system|>\\nYou are kind.\\n' }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token }}
    {%- if message['role'] == 'skip' %}{% continue %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}{% generation %}x{% endgeneration %}"""
MESSAGES = [{"role": "user", "content": " über <b> "}, {"role": "skip", "content": "{{ 1 }}"}]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "name": "<f>"}]])
@pytest.mark.parametrize("adds", [False, True])
def test_a_prompt_is_the_one_of_transformers(tmp_path: Path, tools: Any, adds: bool) -> None:
    directory = model_directory(tmp_path, CHATML)
    tokenizer = Tokenizer(directory)
    template = ChatTemplate(CHATML, tokenizer.special_tokens)
    text = template.render(MESSAGES, {"tools": tools, "add_generation_prompt": adds})
    reference = AutoTokenizer.from_pretrained(directory)
    options = {"tools": tools, "add_generation_prompt": adds, "tokenize": False}
    assert text == reference.apply_chat_template(MESSAGES, **options)
    ids = reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(text, special=False) == ids
    assert tokenizer.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize(
    ("source", "reads_parts"),
    [
        (CHAT_TEMPLATE, True),
        (CHATML, False),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m.content | list %}{% endfor %}{% endfor %}", True),
    ],
)
def test_a_template_that_reads_parts_is_recognized(source: str, reads_parts: bool) -> None:
    assert ChatTemplate(source, {}).reads_parts == reads_parts


def test_contents_are_texts_or_parts_as_the_template_reads_them() -> None:
    message = Message("user", [TextPart("a"), TextPart("b")])
    assert conversation_of([message], reads_parts=False).messages[0]["content"] == "a\nb"
    text = Message("user", "a")
    shown = conversation_of([text], reads_parts=True).messages[0]["content"]
    assert shown == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "can't be applied"),
        ("{{ messages.append(1) }}", "can't be applied"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "can't be applied"),
        ("{{ 1 / 0 }}", "can't be applied"),
        ("{{ messages[0]['content']['a'] + 1 }}", "can't be applied"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(source: str, match: str) -> None:
    with pytest.raises(TemplateError, match=match):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], {})


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 9000000 }}", "{{ raise_exception('x' * 9000000) }}", "{{ 'x' * 1000000 }}"]
)
def test_the_process_answers_no_more_than_a_prompt_can_have(source: str) -> None:
    request = {"source": source, "special_tokens": {}, "messages": [], "variables": {}}
    assert len(json.dumps(_answer(request))) <= PROMPT_CHARACTERS_MAX + len('{"text": ""}')


def test_a_template_with_wrong_syntax_is_refused() -> None:
    for source in ("{% for %}", "{{", "{% unknown %}"):
        with pytest.raises(ValueError, match="can't be read"):
            ChatTemplate(source, {})


def sources_of(directory: Any, configured: Any = "") -> Any:
    sources = read_model_files(str(directory), configured).sources
    return sources.default, sources.tool_use


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (None, ("", "")),
        ("a", ("a", "")),
        ([{"name": "default", "template": "b"}], ("b", "")),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "b"}], ("b", "t")),
        ({"default": "b", "rag": "r"}, ("b", "")),
    ],
)
def test_templates_are_found_in_the_configuration_of_a_tokenizer(
    tmp_path: Path, saved: Any, expected: Any
) -> None:
    directory = model_directory(tmp_path, None)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": saved}))
    assert sources_of(directory) == expected


@pytest.mark.parametrize("saved", [5, [], [{"name": "rag", "template": "r"}], {}])
def test_an_entry_without_a_template_for_chats_is_reported(tmp_path: Path, saved: Any) -> None:
    directory = model_directory(tmp_path, None)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": saved}))
    files = read_model_files(str(directory))
    assert "named 'default'" in files.templates.problem
    assert files.templates.default is None


def test_a_wrong_template_of_the_model_is_reported_and_a_configured_one_refused(
    tmp_path: Path,
) -> None:
    directory = model_directory(tmp_path, "{% for %}")
    assert "can't be read" in read_model_files(str(directory)).templates.problem
    configured = directory / "chat_template.jinja"
    with pytest.raises(ValueError, match="can't be read"):
        read_model_files(str(directory), str(configured))


def test_templates_have_files_of_their_own(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, None)
    (directory / "chat_template.json").write_text('{"chat_template": "p"}')
    assert sources_of(directory) == ("p", "")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = {"default": "c", "tool_use": "t", "rag": "r"}
    tokenizer.save_pretrained(directory)
    assert sources_of(directory) == ("c", "t")
    configured = tmp_path / "own.jinja"
    configured.write_text("d")
    assert sources_of(directory, str(configured)) == ("d", "")
