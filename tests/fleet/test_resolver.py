"""The catalogue as a dock's gateway asks it: paths and fingerprints, never an old guess."""

import asyncio
from pathlib import Path

import pytest

from loradock.fleet.catalogue import Catalogue, WantedAdapter
from loradock.fleet.resolver import CatalogueResolver
from loradock.gateway.http.errors import HttpError
from tests.support.fleet.etcd import Etcd
from tests.support.waiting import HANG_S


def test_an_adapter_is_found_as_soon_as_it_is_wanted(one_etcd: Etcd) -> None:
    async def test() -> None:
        resolver = CatalogueResolver(str(one_etcd.file))
        with pytest.raises(HttpError) as refused:
            resolver.fingerprint_of("any")
        assert refused.value.status == 503
        running = asyncio.create_task(resolver.run())
        async with Catalogue(one_etcd.config) as catalogue:
            await catalogue.put("before", WantedAdapter("a", "ab" * 16))
            while True:
                try:
                    assert resolver.fingerprint_of("unknown") == ""
                except HttpError:
                    await asyncio.sleep(0.01)
                else:
                    break
            for number in range(20):
                name = f"late-{number}"
                await catalogue.put(name, WantedAdapter(name, "cd" * 16))
                assert await resolver.resolve("base", name) == name
                # A request that was resolved is checked next.
                assert resolver.fingerprint_of(name) == "cd" * 16
            assert await resolver.resolve("base", "before") == "a"
            assert await resolver.resolve("base", "unknown") is None
            for number in range(20):
                await catalogue.delete(WantedAdapter, f"late-{number}")
            await catalogue.delete(WantedAdapter, "before")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), HANG_S))


def test_without_etcd_what_was_not_read_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('members = ["http://127.0.0.1:1"]\nkey = "0123456789abcdef"\n')
    file.chmod(0o600)

    async def test() -> None:
        resolver = CatalogueResolver(str(file))
        running = asyncio.create_task(resolver.run())
        with pytest.raises(HttpError) as refused:
            await resolver.resolve("base", "any")
        assert refused.value.status == 503
        running.cancel()

    asyncio.run(asyncio.wait_for(test(), HANG_S))
