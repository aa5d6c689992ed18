"""Tests of the table of methods: both clients have all of them, with complete types."""

import inspect
from pathlib import Path

import pytest

from loradock.client import (
    AsyncClient,
    AsyncEventStream,
    AsyncGeneration,
    Client,
    EventStream,
    Generation,
    methods,
)

ROOT = Path(__file__).parents[3]


# A user's program: mypy must find exactly the errors that are marked.
def public_methods(owner):
    return {
        name: method
        for name, method in vars(owner).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


TABLE = {
    name: function
    for name, function in public_methods(methods).items()
    if function.__module__ == methods.__name__
}


@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_a_client_has_every_method_of_the_table(client):
    assert len(TABLE) == 25
    assert set(public_methods(client)) == {*TABLE, "close"}
    for name, function in TABLE.items():
        method = getattr(client, name)
        assert method.__name__ == name
        assert method.__doc__ == function.__doc__
        self, *parameters = inspect.signature(method).parameters.values()
        assert self.name == "self"
        assert parameters == list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [(Client, AsyncClient), (Generation, AsyncGeneration), (EventStream, AsyncEventStream)],
)
def test_both_clients_have_the_same_signatures(blocking, asynchronous):
    assert set(public_methods(blocking)) == set(public_methods(asynchronous))
    for name, method in public_methods(blocking).items():
        twin = getattr(asynchronous, name)
        first, second = inspect.signature(method), inspect.signature(twin)
        assert first.parameters == second.parameters, name
        result = first.return_annotation
        is_handle = name in ("generate", "events")
        assert second.return_annotation == (f"Async{result}" if is_handle else result), name


def test_the_methods_of_the_asyncio_client_are_coroutine_functions():
    asynchronous = public_methods(AsyncClient)
    # A generation can be awaited, and iterated over without that.
    assert not inspect.iscoroutinefunction(asynchronous.pop("generate"))
    assert all(map(inspect.iscoroutinefunction, asynchronous.values()))
    assert not any(map(inspect.iscoroutinefunction, public_methods(Client).values()))


def test_a_method_states_the_type_of_its_result():
    for name in ("load", "list", "embed"):
        annotation = inspect.signature(getattr(Client, name)).return_annotation
        assert (
            annotation.__name__
            == {
                "load": "AdapterDone",
                "list": "AdaptersListed",
                "embed": "Embedding",
            }[name]
        )
