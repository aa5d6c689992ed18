"""What else fails in a fleet, under load: `make fleet-failures`. Every answer is checked.

Killed and stopped docks, and killed pickers, are in `test_front.py`. A request that would hang
fails the test as all hanging waits do; no result depends on a time.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loradock.fleet.catalogue import CatalogueError
from tests.support.fleet.etcd import etcd, free_ports
from tests.support.fleet.fleets import Clients, Dock, Fleet
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.skipif(
    not os.environ.get("LORADOCK_FLEET_FAILURES"), reason="run by `make fleet-failures`"
)

HOST, OTHER = "10.231.47.1", "10.231.47.2"
STORE, SOURCE = "10.231.47.3", "10.231.47.4"
"""Of etcd on this machine, and from where the other machine connects to it."""


def test_without_a_quorum_the_fleet_serves_as_it_is(tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd", 3) as cluster, Fleet(cluster, tmp_path) as fleet:
        with Clients(fleet) as clients:
            clients.wait_for(20)
            for member in cluster.members[:2]:
                cluster.kill(member)
            with pytest.raises((CatalogueError, subprocess.CalledProcessError)):
                fleet.fronts()
            clients.wait_for(200)
            # A dock that ends is tried, refused, and passed over.
            fleet.docks[0].kill()
            clients.wait_for(200)
            for member in cluster.members[:2]:
                cluster.start(member)
            fleet.restart(fleet.docks[0])
            wait_until(fleet.is_whole, lambda: len(clients.answers))
            clients.wait_for(50)
        assert clients.statuses().keys() == {200}


def test_another_front_serves_when_one_dies(tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd") as cluster, Fleet(cluster, tmp_path) as fleet:
        (port,) = free_ports(1)
        other = fleet.start_front(port)
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=url, timeout=HANG_S, trust_env=False) as http:
                # Before its picker follows the docks, a front takes them in turn.
                wait_until(lambda: fleet.serves(http) and fleet.ready(http) == 3)
                wait_until(lambda: len(fleet.fronts()) == 2)
                home = fleet.complete("adapter-0").text
                fleet.front.kill()
                for _ in range(20):
                    answer = fleet.complete("adapter-0", http)
                    # Both pickers see where the adapter is.
                    assert (answer.status, answer.text) == (200, home)
        finally:
            other.kill()


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace that is this machine's only neighbour."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    name = f"dock-{os.getpid()}"
    steps = [
        f"ip netns add {name}",
        f"ip link add lora0 type veth peer name lora1 netns {name}",
        f"ip address add {HOST}/24 dev lora0",
        f"ip address add {STORE}/24 dev lora0",
        "ip link set lora0 up",
        f"ip -n {name} address add {OTHER}/24 dev lora1",
        f"ip -n {name} address add {SOURCE}/24 dev lora1",
        f"ip -n {name} link set lora1 up",
        f"ip -n {name} link set lo up",
        f"ip -n {name} route add {STORE}/32 dev lora1 src {SOURCE}",
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{step}: {done.stderr.strip()}")
        yield name
    finally:
        # The namespace ends later than the command; its link must not be in the next one's way.
        subprocess.run(["ip", "link", "delete", "lora0"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@contextmanager
def cut(device: str, address: str, *namespace: str) -> Iterator[None]:
    """Lose what is sent to a neighbour: its hardware address leads nowhere."""
    command = ["ip", *namespace, "neigh"]
    nowhere = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    subprocess.run([*command, "replace", address, "dev", device, *nowhere], check=True)
    try:
        yield
    finally:
        subprocess.run([*command, "del", address, "dev", device], check=True)


READ_DOCKS = """
import asyncio, sys
from loradock.fleet.catalogue import Catalogue, Dock
from loradock.fleet.config import read_config
async def read():
    async with Catalogue(read_config(sys.argv[1])) as catalogue:
        print(len(await catalogue.read(Dock)))
asyncio.run(read())
"""


def test_docks_that_are_all_cut_off_from_etcd_are_served(namespace: str, tmp_path: Path) -> None:
    inside = ["ip", "netns", "exec", namespace]
    with etcd(tmp_path / "etcd", 1, OTHER, inside) as cluster, Fleet(cluster, tmp_path) as fleet:

        def registered() -> int:
            """Return how many docks the catalogue has, as etcd's own machine sees it."""
            command = [*inside, sys.executable, "-c", READ_DOCKS, str(cluster.file)]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            return int(found.stdout)

        with Clients(fleet) as clients:
            clients.wait_for(20)
            subprocess.run(["ip", "link", "set", "lora0", "down"], check=True)
            wait_until(lambda: registered() == 0, lambda: len(clients.answers))
            clients.wait_for(50)
            subprocess.run(["ip", "link", "set", "lora0", "up"], check=True)
            # The front reads that no dock is there, until they have registered anew.
            wait_until(lambda: registered() == 3, lambda: len(clients.answers))
            clients.wait_for(50)
            wait_until(fleet.is_whole, lambda: len(clients.answers))
        assert clients.statuses().keys() == {200}


def test_a_machine_that_is_cut_off_loses_no_request(namespace: str, tmp_path: Path) -> None:
    with etcd(tmp_path / "etcd", 1, HOST) as cluster:
        fleet = Fleet(cluster, tmp_path, 2)
        (port,) = free_ports(1)
        prefix = ["ip", "netns", "exec", namespace]
        far = Dock(port, cluster, tmp_path / "far", OTHER, prefix)
        fleet.docks.append(far)
        with fleet:
            adapter = next(
                name
                for name in ("adapter-0", "adapter-1", "adapter-2", "adapter-3")
                if fleet.complete(name).text == str(port)
            )
            far.be_silent()
            with Clients(fleet, 2, adapter) as clients:
                # Requests are in the dock when the link goes down, and others follow.
                wait_until(far.is_asked)
                subprocess.run(["ip", "link", "set", "lora0", "down"], check=True)
                # The address of etcd stays, as that of the machine itself.
                clients.wait_for(20)
                assert str(port) not in {one.text for one in clients.answers}
                far.be_silent(False)
                subprocess.run(["ip", "link", "set", "lora0", "up"], check=True)
                wait_until(fleet.is_whole, lambda: len(clients.answers))
                wait_until(lambda: fleet.complete("").text == str(port))
            assert clients.statuses().keys() == {200}


@pytest.mark.parametrize("is_front", [True, False], ids=["front to dock", "dock to etcd"])
def test_one_link_of_a_dock_that_is_cut_loses_no_request(
    is_front: bool, namespace: str, tmp_path: Path
) -> None:
    with etcd(tmp_path / "etcd", 1, STORE) as cluster:
        fleet = Fleet(cluster, tmp_path, 2)
        (port,) = free_ports(1)
        prefix = ["ip", "netns", "exec", namespace]
        fleet.docks.append(Dock(port, cluster, tmp_path / "far", OTHER, prefix))
        far = f"{OTHER}:{port}"
        with fleet, Clients(fleet) as clients:
            clients.wait_for(20)
            with cut("lora0", OTHER) if is_front else cut("lora1", STORE, "-n", namespace):
                # Without its lease it is forgotten, unreachable it is not: it can be back any time.
                wait_until(
                    lambda: not fleet.status()["docks"].get(far, {"ready": False})["ready"],
                    lambda: len(clients.answers),
                )
                assert (far in fleet.status()["docks"]) == is_front
                before = len(clients.answers)
                clients.wait_for(50)
                # Some were asked before.
                assert str(port) not in {one.text for one in clients.answers[before + 20 :]}
            wait_until(fleet.is_whole, lambda: len(clients.answers))
            wait_until(lambda: fleet.complete("").text == str(port))
            clients.wait_for(20)
        assert clients.statuses().keys() == {200}
