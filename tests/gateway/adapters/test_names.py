"""Names of models: the base model's, an adapter's, and both."""

import json

import pytest

from loradock.gateway.adapters.follower import AdapterTable
from loradock.gateway.adapters.models import ModelNames, context_tokens, model_cards
from loradock.gateway.http.errors import HttpError


@pytest.mark.parametrize(
    ("configured", "directory", "names"),
    [
        ((), "", ("base",)),
        ((), "models/llama", ("llama", "models/llama")),
        (("org/llama", "short"), "models/llama", ("org/llama", "short")),
    ],
)
def test_the_base_model_has_the_configured_names(configured, directory, names):
    assert ModelNames(configured, directory).base_names == names


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        *((None, None), ("", None), ("org/llama", None), ("short", None)),
        *(("a", "a"), ("org/llama:a", "a"), ("short:a.b-c_1", "a.b-c_1")),
    ],
)
def test_a_request_names_an_adapter_or_the_base_model(model, adapter):
    assert ModelNames(("org/llama", "short")).adapter_of(model) == adapter


@pytest.mark.parametrize(
    "model", ["a/b", "..", "x:a", "short:", "short:a:b", "a\n", "ä", "a" * 129]
)
def test_other_names_are_not_found(model):
    with pytest.raises(HttpError) as caught:
        ModelNames(("short",)).adapter_of(model)
    assert caught.value.status == 404


def test_the_engines_name_is_used_where_the_directory_is_unknown():
    names = ModelNames(())
    names.set_own_name("tiny")
    assert names.base_names == ("tiny",)


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ('{"max_position_embeddings": 64}', 64),
        (json.dumps({"text_config": {"max_position_embeddings": 32}}), 32),
        ('{"max_position_embeddings": "many"}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_the_context_is_read_from_the_models_config(tmp_path, text, context):
    (tmp_path / "config.json").write_text(text)
    assert context_tokens(str(tmp_path)) == context
    assert context_tokens(str(tmp_path / "none")) is None


def test_all_configured_names_of_the_base_model_are_listed(tmp_path):
    table = AdapterTable()
    for served, listed in ((("org/llama", "short"), ["org/llama", "short"]), ((), ["tiny"])):
        names = ModelNames(served, str(tmp_path / "tiny"))
        cards = model_cards(names, table, 64).data
        assert [card.id for card in cards] == listed
        assert {card.root for card in cards} == {str(tmp_path / "tiny")}
