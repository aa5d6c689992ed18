"""Members of etcd on this machine, with the certificates that `loradock fleet init` writes."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loradock.fleet.config import FleetConfig, read_config, tls_context
from loradock.fleet.setup import Member, etcd_command, write_fleet
from tests.support.waiting import wait_until


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _free_pair() -> int:
    """A port that is free with its next one."""
    while True:
        (port,) = free_ports(1)
        try:
            socket.create_server(("127.0.0.1", port + 1)).close()
        except OSError:
            continue
        return port


class Etcd:
    """A cluster; `file` is its `fleet.toml`."""

    def __init__(
        self, directory: Path, count: int, host: str = "127.0.0.1", prefix: Sequence[str] = ()
    ) -> None:
        self._prefix = prefix
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed: apt-get install etcd-server")
        self.members = [Member(host, _free_pair()) for _ in range(count)]
        self.directory = directory
        write_fleet(directory, self.members, "test")
        self.file = directory / "fleet.toml"
        self.config: FleetConfig = read_config(self.file)
        self._processes: dict[Member, subprocess.Popen[bytes]] = {}

    def start(self, member: Member) -> None:
        state = self.directory / member.name
        command = etcd_command(self.members, member, self.directory, state, "t")
        # A test's data need no disk: the fleet is as fast as the machine.
        command = [*command, "--unsafe-no-fsync"] if _can_skip_sync() else command
        command = [*self._prefix, *command]
        log = (self.directory / f"{member.name}.log").open("ab")
        self._processes[member] = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()

    def is_healthy(self, member: Member) -> bool:
        try:
            verify = tls_context(self.config)
            found = httpx.get(f"https://{member.host}:{member.port}/health", verify=verify)
        except httpx.HTTPError:
            return False
        return found.json().get("health") == "true"

    def signal(self, member: Member, number: signal.Signals) -> None:
        self._processes[member].send_signal(number)

    def kill(self, member: Member) -> None:
        process = self._processes.pop(member)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for member in [*self._processes]:
            self.kill(member)


def _can_skip_sync() -> bool:
    help_ = subprocess.run(["etcd", "--help"], capture_output=True, text=True, check=False)
    return "--unsafe-no-fsync" in help_.stdout + help_.stderr


@contextmanager
def etcd(
    directory: Path, count: int = 1, host: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[Etcd]:
    """A cluster that answers; skips the test if etcd is not installed."""
    cluster = Etcd(directory, count, host, prefix)
    try:
        for member in cluster.members:
            cluster.start(member)
        wait_until(lambda: all(map(cluster.is_healthy, cluster.members)), what="etcd")
        yield cluster
    finally:
        cluster.stop()
