"""Adapters of the command line: parsed, loaded at the start, and fatal where they can't be."""

import asyncio
from typing import Any

import pytest

from loradock.client import AdapterNotFound, AsyncClient, EngineGone
from loradock.gateway.adapters import sources as lora_modules
from loradock.gateway.adapters.sources import LoraModule, load_modules, parse_lora_modules


def test_modules_are_pairs_or_json() -> None:
    options = ("a=x/y=z", '{"name": "b", "path": "c", "base_model_name": "d"}')
    assert parse_lora_modules(options) == (LoraModule("a", "x/y=z"), LoraModule("b", "c", "d"))


@pytest.mark.parametrize(
    "options", [["a"], ["=x"], ["a="], ["{}"], ["{"], ["a b=x"], ["a=x", "a=y"], ['{"name": 5}']]
)
def test_malformed_modules_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="--lora-modules"):
        parse_lora_modules(options)


class Client(AsyncClient):
    """Fails with each of `errors` in turn."""

    def __init__(self, *errors: Any) -> None:
        self.errors = [*errors]
        self.loaded: list[Any] = []

    async def load(self, *named: Any, **_: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        self.loaded.append(named)


def test_modules_are_loaded_once_the_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_modules, "_RETRY_S", 0.0)
    client = Client(EngineGone("not yet"), EngineGone("not yet"))
    asyncio.run(load_modules(client, parse_lora_modules(["a=x", "b=y"])))
    assert client.loaded == [("a", "x"), ("b", "y")]


def test_a_module_that_can_not_be_loaded_is_an_error() -> None:
    with pytest.raises(AdapterNotFound):
        asyncio.run(load_modules(Client(AdapterNotFound("no")), parse_lora_modules(["a=x"])))
