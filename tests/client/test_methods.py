"""Both clients have the same methods, with complete types."""

import inspect
from collections.abc import Callable

import pytest

from loradock.client import (
    AsyncClient,
    AsyncEventStream,
    AsyncGeneration,
    Client,
    EventStream,
    Generation,
)
from loradock.client.methods import Methods


def public_methods(owner: type) -> dict[str, Callable[..., object]]:
    members = inspect.getmembers(owner, inspect.isfunction)
    return {name: method for name, method in members if not name.startswith("_")}


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [(Client, AsyncClient), (Generation, AsyncGeneration), (EventStream, AsyncEventStream)],
)
def test_both_clients_have_the_same_signatures(blocking: type, asynchronous: type) -> None:
    methods = public_methods(blocking)
    assert set(methods) == set(public_methods(asynchronous))
    for name, method in methods.items():
        twin = getattr(asynchronous, name)
        first, second = inspect.signature(method), inspect.signature(twin)
        assert (first.parameters, method.__name__) == (second.parameters, name)
        assert method.__doc__ == twin.__doc__ or name == "close"
        handles = {"generate": (Generation, "AsyncGeneration")}
        handles["events"] = (EventStream, AsyncEventStream)
        if name in handles:
            assert (first.return_annotation, second.return_annotation) == handles[name]
        else:
            assert (
                first.return_annotation == second.return_annotation is not inspect.Signature.empty
            )


def test_the_methods_of_the_asyncio_client_are_coroutine_functions() -> None:
    asynchronous = public_methods(AsyncClient)
    assert {*public_methods(Methods), "close"} == {*asynchronous}
    # A generation can be awaited, and iterated over without that.
    assert not inspect.iscoroutinefunction(asynchronous.pop("generate"))
    assert all(map(inspect.iscoroutinefunction, asynchronous.values()))
    assert not any(map(inspect.iscoroutinefunction, public_methods(Client).values()))
