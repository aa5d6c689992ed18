"""A dock as a member of a fleet: registered while it serves, with the copies that are wanted."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loradock.fleet.catalogue import Catalogue, Dock, WantedAdapter
from loradock.fleet.config import FleetConfig
from loradock.fleet.member import MemberConfig, _wait_for
from loradock.fleet.placement import rendezvous
from loradock.fleet.process import advertised_host
from loradock.fleet.setup import parse_members
from loradock.messages import requests as rq
from loradock.processes.subprocesses import process_command
from tests.support.fleet.etcd import Etcd
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import HANG_S, wait_until

PLAIN = FleetConfig(("http://127.0.0.1:2379",), "k" * 16)


def received(controller: StandIn, kind: type) -> list[str]:
    return [one.adapter for one in controller.received if isinstance(one, kind)]


async def is_registered(etcd: Etcd, address: str) -> bool:
    async with Catalogue(etcd.config) as catalogue:
        return address in await catalogue.read(Dock)


def test_a_dock_is_registered_and_keeps_its_copies(one_etcd: Etcd, tmp_path: Path) -> None:
    with StandIn(tmp_path) as controller, socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]
        address = f"127.0.0.1:{port}"
        controller.answers[rq.LoadAdapter] = lambda _: None
        config = MemberConfig(
            fleet=str(one_etcd.file),
            host="127.0.0.1",
            port=port,
            slots=4,
            directory=str(tmp_path),
            model="base",
        )

        async def test() -> None:
            async with Catalogue(one_etcd.config) as catalogue:
                # Another dock, so that each adapter has two places for one copy.
                await catalogue.put("other:1", Dock("other:1"))
                async for table in catalogue.follow(Dock):
                    if address in table:
                        assert table[address].record == Dock(address, "base", 4)
                        break
                weights = {address: 4, "other:1": 1}
                names = [f"adapter-{number}" for number in range(40)]
                own = [name for name in names if rendezvous(name, weights, 1)[0] == address]
                (theirs, *_) = [name for name in names if name not in own]
                await catalogue.put(theirs, WantedAdapter("a", copies=1))
                await catalogue.put("by-demand", WantedAdapter("b"))
                await catalogue.put(own[0], WantedAdapter("c", copies=1))
                await asyncio.to_thread(
                    wait_until, lambda: own[0] in received(controller, rq.LoadAdapter)
                )
                assert {*received(controller, rq.LoadAdapter)} == {own[0]}
                # The other dock goes, and its copies come.
                del controller.answers[rq.LoadAdapter]
                await catalogue.delete(Dock, "other:1")
                await asyncio.to_thread(
                    wait_until, lambda: theirs in received(controller, rq.LoadAdapter)
                )
                await catalogue.delete(WantedAdapter, theirs)
                await asyncio.to_thread(
                    wait_until, lambda: theirs in received(controller, rq.RemoveAdapter)
                )
                for name in ("by-demand", own[0]):
                    await catalogue.delete(WantedAdapter, name)

        process = subprocess.Popen(process_command("member", config))
        try:
            asyncio.run(asyncio.wait_for(test(), HANG_S))
            process.terminate()
            assert process.wait(HANG_S) == 0
            # At once, and not with its lease.
            assert not asyncio.run(is_registered(one_etcd, address))
        finally:
            process.kill()
            process.wait()


@contextmanager
def a_member(etcd: Etcd, directory: Path) -> Iterator[tuple[StandIn, str]]:
    """A member of the fleet before a stand-in; yields that and the dock's address."""
    with StandIn(directory) as controller, socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]
        config = MemberConfig(
            fleet=str(etcd.file), host="127.0.0.1", port=port, slots=4, directory=str(directory)
        )
        process = subprocess.Popen(process_command("member", config))
        try:
            yield controller, f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def test_a_dock_loads_other_content_again_once_and_no_more_than_it_has(
    one_etcd: Etcd, tmp_path: Path
) -> None:
    async def test(controller: StandIn) -> None:
        async with Catalogue(one_etcd.config) as catalogue:
            for revision in ("cd", "ef"):
                await catalogue.put("upper", WantedAdapter("new/upper", revision * 16))
                # As if the files were still the old ones.
                await asyncio.to_thread(
                    wait_until, lambda: "upper" in received(controller, rq.LoadAdapter)
                )
                (load,) = controller.requests(rq.LoadAdapter)
                assert (load.path, load.replace) == ("new/upper", True)
                controller.received.clear()
            # The next pass finds the right content, and after it a sign that it has ended.
            await catalogue.put("upper", WantedAdapter("new/upper", "ab" * 16))
            await catalogue.put("z-missing", WantedAdapter("z", copies=9))
            await asyncio.to_thread(
                wait_until, lambda: "z-missing" in received(controller, rq.LoadAdapter)
            )
            assert {*received(controller, rq.LoadAdapter)} == {"z-missing"}
            for name in ("upper", "z-missing"):
                await catalogue.delete(WantedAdapter, name)

    with a_member(one_etcd, tmp_path) as (controller, _):
        asyncio.run(asyncio.wait_for(test(controller), HANG_S))


def test_a_copy_that_another_dock_keeps_is_held_no_more(one_etcd: Etcd, tmp_path: Path) -> None:
    async def test(controller: StandIn, address: str) -> None:
        async with Catalogue(one_etcd.config) as catalogue:
            other = "other:1"
            while rendezvous("upper", {address: 4, other: 1}, 1)[0] == address:
                other = f"other:{int(other[6:]) + 1}"
            await catalogue.put("upper", WantedAdapter("upper", "ab" * 16, hold=True, copies=1))
            await asyncio.to_thread(
                wait_until, lambda: "upper" in received(controller, rq.HoldAdapter)
            )
            assert not received(controller, rq.ReleaseAdapter)
            await catalogue.put(other, Dock(other))
            await asyncio.to_thread(
                wait_until, lambda: "upper" in received(controller, rq.ReleaseAdapter)
            )
            await catalogue.delete(Dock, other)
            await catalogue.delete(WantedAdapter, "upper")

    with a_member(one_etcd, tmp_path) as (controller, address):
        asyncio.run(asyncio.wait_for(test(controller, address), HANG_S))


def test_a_dock_that_listens_everywhere_is_reached_at_its_address_on_the_way_to_etcd() -> None:
    assert advertised_host("0.0.0.0", PLAIN) == "127.0.0.1"
    assert advertised_host("m1", PLAIN) == "m1"
    assert advertised_host("fd00::1", PLAIN) == "[fd00::1]"


def test_rendezvous_moves_only_the_share_of_a_dock_that_goes() -> None:
    weights = {"a": 4, "b": 4, "c": 8}
    names = [f"adapter-{number}" for number in range(2000)]
    first = {name: rendezvous(name, weights, 3) for name in names}
    counts = {dock: sum(order[0] == dock for order in first.values()) for dock in weights}
    # Half, and a quarter each; six standard deviations.
    assert abs(counts["c"] - 1000) < 135
    assert abs(counts["a"] - 500) < 120
    for name in names:
        left = rendezvous(name, {"a": 4, "c": 8}, 2)
        assert left == [dock for dock in first[name] if dock != "b"]


PROCESSES = """
import sys
import loradock.cli.main, loradock.cli.serve.command, loradock.cli.serve.supervisor
import loradock.controller.server.process, loradock.gateway.server.process
from loradock.gateway.options import GatewayConfig
from loradock.gateway.server.gateway import Gateway
import asyncio
async def construct():
    Gateway(GatewayConfig(directory=sys.argv[1]))
asyncio.run(construct())
loaded = {name.split(".")[0] for name in sys.modules}
loaded |= {name for name in sys.modules if name.startswith("loradock.fleet")}
print(*sorted(loaded & {"grpc", "httpx", "google", "cryptography", "loradock.fleet"}))
"""


def test_a_plain_server_imports_nothing_of_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", PROCESSES, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ""}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("text", ["", "m1,m2", "m1:x", "m1,,m3"])
def test_members_are_an_odd_number_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"members"):
        parse_members(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_member_waits_for_its_gateway_where_others_reach_it(host: str) -> None:
    """A gateway can serve at one address of its machine alone, which is not localhost then."""
    with socket.create_server((host, 0)) as server:
        address = f"{host}:{server.getsockname()[1]}"
        asyncio.run(asyncio.wait_for(_wait_for(address), HANG_S))
