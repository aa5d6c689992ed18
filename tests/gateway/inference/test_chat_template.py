"""Chat templates: equal to those that transformers renders, and harmless."""

import json

import pytest
from transformers import AutoTokenizer

from gateway.http.errors import HttpError
from gateway.inference.chat_template import ChatTemplate, find_template
from gateway.inference.messages import Message, TextPart, conversation_of
from gateway.inference.tokenizer import Tokenizer
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
def test_a_prompt_is_the_one_of_transformers(tmp_path, tools, adds):
    directory = model_directory(tmp_path, CHATML)
    tokenizer = Tokenizer(directory)
    template = ChatTemplate(find_template(directory, "", tokenizer), tokenizer.special_tokens)
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
def test_a_template_that_reads_parts_is_recognized(source, reads_parts):
    assert ChatTemplate(source, {}).reads_parts == reads_parts


def test_contents_are_texts_or_parts_as_the_template_reads_them():
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
def test_a_template_that_fails_refuses_the_messages(source, match):
    with pytest.raises(HttpError, match=match) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], {})
    assert caught.value.status == 400


def test_a_template_with_wrong_syntax_is_refused():
    for source in ("{% for %}", "{{", "{% unknown %}"):
        with pytest.raises(ValueError, match="can't be read"):
            ChatTemplate(source, {})


def test_templates_are_found_where_models_save_them(tmp_path):
    directory = model_directory(tmp_path, None)
    tokenizer = Tokenizer(directory)
    assert find_template(directory, "", tokenizer) == ""
    for saved, expected in (("a", "a"), ([{"name": "default", "template": "b"}], "b"), (5, "")):
        config = {"chat_template": saved}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        assert find_template(directory, "", Tokenizer(directory)) == expected
    (directory / "chat_template.jinja").write_text("c")
    assert find_template(directory, "", tokenizer) == "c"
    configured = tmp_path / "own.jinja"
    configured.write_text("d")
    assert find_template(directory, str(configured), tokenizer) == "d"
