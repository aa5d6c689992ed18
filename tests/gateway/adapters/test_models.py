"""Names of models: the base model's, an adapter's, and both; and their files in a fleet."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loradock.client import AsyncClient
from loradock.gateway.adapters.follower import AdapterTable, Follower
from loradock.gateway.adapters.models import ModelNames, Models, context_tokens, model_cards
from loradock.gateway.adapters.sources import Resolution
from loradock.gateway.http.errors import HttpError
from loradock.messages.requests import AdapterShown
from tests.support.simulation.standin_controller import view


@pytest.mark.parametrize(
    ("configured", "directory", "names"),
    [
        ((), "", ("base",)),
        ((), "models/llama", ("llama", "models/llama")),
        (("org/llama", "short"), "models/llama", ("org/llama", "short")),
    ],
)
def test_the_base_model_has_the_configured_names(
    configured: Any, directory: Any, names: Any
) -> None:
    assert ModelNames(configured, directory).base_names == names


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        *((None, None), ("", None), ("org/llama", None), ("short", None)),
        *(("a", "a"), ("org/llama:a", "a"), ("short:a.b-c_1", "a.b-c_1")),
    ],
)
def test_a_request_names_an_adapter_or_the_base_model(model: Any, adapter: Any) -> None:
    assert ModelNames(("org/llama", "short")).adapter_of(model) == adapter


@pytest.mark.parametrize(
    "model", ["a/b", "..", "x:a", "short:", "short:a:b", "a\n", "ä", "a" * 129]
)
def test_other_names_are_not_found(model: Any) -> None:
    with pytest.raises(HttpError) as caught:
        ModelNames(("short",)).adapter_of(model)
    assert caught.value.status == 404


def test_the_engines_name_is_used_where_the_directory_is_unknown() -> None:
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
def test_the_context_is_read_from_the_models_config(
    tmp_path: Path, text: str, context: Any
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert context_tokens(str(tmp_path)) == context
    assert context_tokens(str(tmp_path / "none")) is None


def test_all_configured_names_of_the_base_model_are_listed(tmp_path: Path) -> None:
    table = AdapterTable()
    for served, listed in ((("org/llama", "short"), ["org/llama", "short"]), ((), ["tiny"])):
        names = ModelNames(served, str(tmp_path / "tiny"))
        cards = model_cards(names, table, 64).data
        assert [card.id for card in cards] == listed
        assert {card.root for card in cards} == {str(tmp_path / "tiny")}


class Dock(AsyncClient):
    """Has `content` of an adapter once it has loaded it."""

    def __init__(self, content: str) -> None:
        self.content = content
        self.is_loaded = False

    async def load(self, *_: Any, **__: Any) -> Any:
        self.is_loaded = True

    async def show(self, adapter: str, *_: Any) -> AdapterShown:
        return AdapterShown("r", view(adapter, fingerprint=self.content if self.is_loaded else ""))


class Wanted:
    """A catalogue in which every adapter has one fingerprint."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def fingerprint_of(self, _: str) -> str:
        return self.fingerprint


def found(content: str, wanted: str, *, known: str | None, replaced: bool = False) -> str | None:
    """Find `a` in a dock with this content, whose table has it with the fingerprint `known`."""
    client, table = Dock(content), AdapterTable()
    if known is not None:
        table.views["a"] = view("a", fingerprint=known)
    if replaced:
        table.replaced.add("a")
        client.is_loaded = True
    resolution = Resolution(client, [lambda _, name: name])
    models = Models(Follower(client, table), ModelNames(("base",)), resolution, Wanted(wanted))
    return asyncio.run(models.find("a"))


@pytest.mark.parametrize(
    ("known", "replaced"),
    [
        # Loaded; being loaded; known by the controller alone, or by nobody; replaced just now.
        ("right", False), ("", False), (None, False), ("old", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", ["right", "wrong"])
def test_a_dock_finds_an_adapter_only_with_the_files_of_the_fleet(
    content: str, known: str | None, replaced: bool
) -> None:
    known = content if known == "right" else known
    assert found(content, "", known=known, replaced=replaced) == "a"
    if content == "right":
        assert found(content, "right", known=known, replaced=replaced) == "a"
        return
    with pytest.raises(HttpError) as refused:
        found(content, "right", known=known, replaced=replaced)
    assert refused.value.status == 503
