"""The catalogue on a real etcd: compare-and-swap, leases, and tables that follow changes."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from loradock.fleet.catalogue import (
    Catalogue,
    CatalogueError,
    Dock,
    Front,
    WantedAdapter,
    _Answer,
    _text,
)
from loradock.fleet.config import FleetConfig
from loradock.fleet.leases import Registration
from tests.support.fleet.etcd import Etcd, etcd
from tests.support.waiting import HANG_S

DOCK = Dock("10.0.0.1:8001", "base", 4)
WANTED = WantedAdapter("adapters/sales", "ab" * 16, 8, hold=True, copies=2)


def run(config: FleetConfig, test: Callable[[Catalogue], Awaitable[Any]]) -> Any:
    async def with_catalogue() -> Any:
        async with asyncio.timeout(HANG_S), Catalogue(config) as catalogue:
            return await test(catalogue)

    return asyncio.run(with_catalogue())


async def until(
    catalogue: Catalogue, kind: Any, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    async for table in catalogue.follow(kind):
        if condition(table):
            return dict(table)
    raise AssertionError


def test_a_record_is_written_if_nobody_else_has_changed_it(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        assert await catalogue.get(WantedAdapter, "sales") is None
        assert await catalogue.put("sales", WANTED, changed=0)
        assert not await catalogue.put("sales", WANTED, changed=0)
        found = await catalogue.get(WantedAdapter, "sales")
        assert found is not None
        assert found.record == WANTED
        other = WantedAdapter("elsewhere")
        assert await catalogue.put("sales", other, changed=found.changed)
        assert not await catalogue.put("sales", WANTED, changed=found.changed)
        assert not await catalogue.delete(WantedAdapter, "sales", changed=found.changed)
        table = await catalogue.read(WantedAdapter)
        assert table["sales"].record == other
        assert table["sales"].epoch == found.epoch
        assert await catalogue.delete(WantedAdapter, "sales")
        assert await catalogue.read(WantedAdapter) == {}

    run(one_etcd.config, test)


def test_a_table_follows_changes_of_its_kind(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        await catalogue.put("a", WANTED)
        following = asyncio.create_task(
            until(catalogue, WantedAdapter, lambda table: table.keys() == {"b"})
        )
        await catalogue.put("other", Front("m1:80"))
        await catalogue.put("b", WANTED)
        await catalogue.delete(WantedAdapter, "a")
        await following
        await catalogue.delete(WantedAdapter, "b")
        await catalogue.delete(Front, "other")

    run(one_etcd.config, test)


def test_a_change_is_not_missed_if_a_watch_ends_before_it_tells_of_it(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        watch = catalogue._watch

        async def cut(*arguments: Any) -> AsyncIterator[Any]:
            catalogue._watch = watch  # type: ignore[method-assign]
            await catalogue.put("a", WANTED)
            async for watched in watch(*arguments):
                # That it was created is the first thing it says.
                yield watched
                return

        catalogue._watch = cut  # type: ignore[method-assign]
        await until(catalogue, WantedAdapter, lambda table: table.keys() == {"a"})
        await catalogue.delete(WantedAdapter, "a")

    run(one_etcd.config, test)


def test_changes_that_etcd_does_not_keep_any_more_are_read(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        watch = catalogue._watch

        async def late(*arguments: Any) -> AsyncIterator[Any]:
            catalogue._watch = watch  # type: ignore[method-assign]
            await catalogue.delete(WantedAdapter, "a")
            await catalogue.put("b", WANTED)
            kept = (await catalogue.read(WantedAdapter))["b"].changed
            await catalogue._call("kv/compaction", {"revision": kept}, _Answer)
            async for watched in watch(*arguments):
                yield watched

        catalogue._watch = late  # type: ignore[method-assign]
        await catalogue.put("a", WANTED)
        await until(catalogue, WantedAdapter, lambda table: table.keys() == {"b"})
        await catalogue.delete(WantedAdapter, "b")

    run(one_etcd.config, test)


def test_tables_follow_an_etcd_that_begins_anew(tmp_path: Path) -> None:
    with etcd(tmp_path) as cluster:
        (member,) = cluster.members

        async def test(catalogue: Catalogue) -> None:
            for _ in range(9):
                await catalogue.put("sales", WANTED)
            is_seen = asyncio.Event()

            async def follow() -> None:
                async for table in catalogue.follow(WantedAdapter):
                    is_seen.set()
                    if table.keys() == {"upper"}:
                        break

            following = asyncio.create_task(follow())
            await is_seen.wait()
            cluster.kill(member)
            shutil.rmtree(tmp_path / member.name)
            cluster.start(member)
            while True:
                with suppress(CatalogueError):
                    if await catalogue.put("upper", WANTED):
                        break
            await following

        run(cluster.config, test)


def test_a_record_that_is_none_hides_no_other(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        await catalogue.put("a", WANTED)
        following = asyncio.create_task(
            until(catalogue, WantedAdapter, lambda table: table.keys() == {"b"})
        )
        # As another version of LoRADock could write it.
        key, other = _text(catalogue._key(WantedAdapter, "a")), _text(b'{"path": 5}')
        await catalogue._call("kv/put", {"key": key, "value": other}, _Answer)
        await catalogue.put("b", WANTED)
        await following
        assert (await catalogue.read(WantedAdapter)).keys() == {"b"}
        with pytest.raises(CatalogueError, match="no WantedAdapter"):
            await catalogue.get(WantedAdapter, "a")
        for name in ("a", "b"):
            await catalogue.delete(WantedAdapter, name)

    run(one_etcd.config, test)


def test_a_registration_lasts_as_long_as_its_lease_and_is_made_again(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        registration = Registration(catalogue, DOCK)
        task = asyncio.create_task(registration.run())
        first = (await until(catalogue, Dock, bool))[DOCK.address]
        # As if the machine had been cut off for longer than the lease.
        await catalogue.revoke(registration._lease)
        later = await until(
            catalogue, Dock, lambda table: bool(table) and table[DOCK.address].epoch > first.epoch
        )
        assert later[DOCK.address].record == DOCK
        task.cancel()
        await registration.end()
        assert await catalogue.read(Dock) == {}

    run(one_etcd.config, test)


def test_a_record_of_a_process_that_was_killed_goes_with_its_lease(one_etcd: Etcd) -> None:
    async def test(catalogue: Catalogue) -> None:
        lease = await catalogue.grant()
        await catalogue.put("m1:80", Front("m1:80"), lease=lease)
        assert await catalogue.keep_alive(lease)
        await until(catalogue, Front, lambda table: not table)
        assert not await catalogue.keep_alive(lease)

    run(one_etcd.config, test)


def test_without_certificates_nothing_is_answered(one_etcd: Etcd) -> None:
    plain = FleetConfig(one_etcd.config.members, "k" * 16)
    with pytest.raises(CatalogueError, match="no member of etcd answers"):
        run(plain, lambda catalogue: catalogue.read(Dock))


def test_an_absent_etcd_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    class Counting(Catalogue):
        async def _call(self, *arguments: Any) -> Any:
            nonlocal tries
            tries += 1
            return await super()._call(*arguments)

    async def test() -> None:
        async with Counting(FleetConfig(("http://127.0.0.1:1",), "k" * 16)) as catalogue:
            following = asyncio.create_task(until(catalogue, Dock, bool))
            registering = asyncio.create_task(Registration(catalogue, DOCK).run())
            while tries < 10:
                await asyncio.sleep(0.001)
            following.cancel()
            registering.cancel()

    for module in ("catalogue", "leases"):
        monkeypatch.setattr(f"loradock.fleet.{module}._RETRY_S", 0.001)
    with capture_logs() as logs:
        asyncio.run(asyncio.wait_for(test(), HANG_S))
    events = sorted(one["event"] for one in logs)
    assert events == ["can't follow the catalogue", "can't register"]


def test_changes_are_followed_past_a_member_that_hangs(tmp_path: Path) -> None:
    with etcd(tmp_path, 3) as cluster:

        async def test(catalogue: Catalogue) -> None:
            is_seen = asyncio.Event()

            async def follow() -> None:
                async for table in catalogue.follow(WantedAdapter):
                    if "sales" in table:
                        is_seen.set()
                    if "upper" in table:
                        break

            following = asyncio.create_task(follow())
            await catalogue.put("sales", WANTED)
            await is_seen.wait()
            # The watch is at the first one, which says nothing more and ends nothing.
            cluster.signal(cluster.members[0], signal.SIGSTOP)
            while True:
                with suppress(CatalogueError):
                    if await catalogue.put("upper", WANTED):
                        break
            await following
            cluster.signal(cluster.members[0], signal.SIGCONT)

        run(cluster.config, test)


def test_without_a_quorum_tables_stay_and_writes_fail(tmp_path: Path) -> None:
    with etcd(tmp_path, 3) as cluster:

        async def test(catalogue: Catalogue) -> None:
            await catalogue.put("sales", WANTED)
            cluster.kill(cluster.members[0])
            await catalogue.put("upper", WANTED)
            cluster.kill(cluster.members[1])
            # Two of three are gone, and what was known still is.
            async for table in catalogue.follow(WantedAdapter):
                assert table.keys() == {"sales", "upper"}
                break
            assert await catalogue.get(WantedAdapter, "sales") is not None
            with pytest.raises(CatalogueError):
                await catalogue.put("lower", WANTED)
            following = asyncio.create_task(
                until(catalogue, WantedAdapter, lambda table: "lower" in table)
            )
            cluster.start(cluster.members[0])
            while True:
                try:
                    await catalogue.put("lower", WANTED)
                except CatalogueError:
                    continue
                break
            await following

        run(cluster.config, test)
