"""Unknown model names that a resolver finds: within roots, once per name, loaded and served."""

import asyncio
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from loradock.client import AdapterNotFound, AsyncClient
from loradock.gateway.adapters import sources as resolvers
from loradock.gateway.adapters.sources import (
    DirectoryResolver,
    Resolution,
    ResolverError,
    configured_resolvers,
)
from loradock.messages import requests as rq
from tests.support.gateway.served import Adapters, serve_gateway
from tests.support.simulation.standin_controller import StandIn


def an_adapter(directory: Any) -> None:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")


def test_a_directory_below_the_root_is_found(tmp_path: Path) -> None:
    an_adapter(tmp_path / "root" / "good")
    an_adapter(tmp_path / "outside")
    (tmp_path / "root" / "empty").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "inside").symlink_to(tmp_path / "root" / "good")
    resolver = DirectoryResolver(str(tmp_path / "root"))
    assert resolver("base", "good") == str(tmp_path / "root" / "good")
    for name in ("empty", "link", "missing", ".", "..", "../outside", "/etc"):
        assert resolver("base", name) is None, name
    with pytest.raises(ResolverError, match="not a directory"):
        DirectoryResolver(str(tmp_path / "nothing"))


def plugin(base: str, name: Any) -> str | None:
    return f"found/{name}" if name.startswith("p-") else None


async def awaited_plugin(base: str, name: Any) -> str | None:
    return plugin(base, name)


def installed(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{value}", resolvers.RESOLVER_GROUP)
        for name, value in values.items()
    )
    monkeypatch.setattr(resolvers, "entry_points", points.select)
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])


def test_installed_plugins_are_used_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, mine="plugin", broken="RESOLVED")
    assert configured_resolvers((), ["mine"]) == (plugin,)
    with pytest.raises(ResolverError, match="installed are: broken, mine"):
        configured_resolvers((), ["other"])
    with pytest.raises(ResolverError, match="not callable"):
        configured_resolvers((), ["broken"])


RESOLVED = 5


class Client(AsyncClient):
    """Counts loads, which end when the test allows it."""

    def __init__(self) -> None:
        self.loads: list[Any] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def load(self, *named: Any, **_: Any) -> Any:
        self.loads.append(named)
        await self.may_end.wait()
        if self.error:
            raise self.error


@pytest.mark.parametrize("resolver", [plugin, awaited_plugin])
def test_concurrent_requests_share_one_resolution(resolver: Any) -> None:
    async def main() -> None:
        client = Client()
        resolution = Resolution(client, [resolver])
        waiting = [asyncio.create_task(resolution.resolve("base", "p-1")) for _ in range(20)]
        while not client.loads:
            await asyncio.sleep(0)
        # A client that leaves does not end the load for the others.
        waiting[0].cancel()
        client.may_end.set()
        results = await asyncio.gather(*waiting[1:])
        assert all(results)
        assert client.loads == [("p-1", "found/p-1")]
        assert not await resolution.resolve("base", "other")
        client.error = AdapterNotFound("no files")
        with pytest.raises(AdapterNotFound):
            await resolution.resolve("base", "p-2")

    asyncio.run(main())


def test_a_resolved_name_is_loaded_and_served(tmp_path: Path) -> None:
    an_adapter(tmp_path / "root" / "late")
    with StandIn(tmp_path) as controller:
        Adapters(controller)
        with serve_gateway(controller, lora_resolver_roots=(str(tmp_path / "root"),)) as gateway:
            for _ in range(2):
                body = {"model": "late", "prompt": "p"}
                assert gateway.post("/v1/completions", body).json()["model"] == "late"
            [request] = controller.requests(rq.LoadAdapter)
            assert request.path == str(tmp_path / "root" / "late")
            response = gateway.post("/v1/completions", {"model": "never", "prompt": "p"})
            assert response.status_code == 404
