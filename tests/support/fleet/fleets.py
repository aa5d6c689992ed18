"""Docks and a front on this machine: real processes but for the docks' controllers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from loradock.messages.errors import ErrorCode
from tests.support.fleet.etcd import Etcd, free_ports
from tests.support.waiting import HANG_S, wait_until

LORADOCK = [sys.executable, "-m", "loradock.cli.main"]


class Process:
    """A command in its own session, with its log in a file."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=True
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the session."""
        for pid in pids_of_session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def child(self, name: str) -> int:
        """Return the process of the child of this name; 0 if there is none."""
        found = [pid for pid in pids_of_session(self.process.pid) if name in _command(pid)]
        return found[0] if found else 0

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


def pids_of_session(session: int) -> list[int]:
    """Return the processes of a session, and of the sessions of their children."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1]), int(fields[3])
    found = {pid for pid, (_, own) in parents.items() if own == session}
    while more := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


class Dock(Process):
    """A dock of `tests.support.fleet.dock`."""

    def __init__(
        self,
        port: int,
        etcd: Etcd,
        directory: Path,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        self.port = port
        self.address = f"{host}:{port}"
        self.directory = directory
        directory.mkdir(exist_ok=True)
        command = [*prefix, sys.executable, "-m", "tests.support.fleet.dock"]
        command += [host, str(port), str(etcd.file), str(directory)]
        super().__init__(command, directory / "log")

    def be_silent(self, is_silent: bool = True) -> None:
        """Answer no generation, or answer them again."""
        for name in ("asked", "silent", "refuses"):
            (self.directory / name).unlink(missing_ok=True)
        if is_silent:
            (self.directory / "silent").touch()

    def refuse(self, code: ErrorCode) -> None:
        """Refuse generations with this code, until `be_silent(False)`."""
        (self.directory / "asked").unlink(missing_ok=True)
        (self.directory / "refuses").write_text(code)

    def is_asked(self) -> bool:
        """Return whether a generation has reached the dock since it became silent or refuses."""
        return (self.directory / "asked").exists()


class Answer(NamedTuple):
    """What a client got: the status, and the text, which is the port of the dock.

    `elapsed_s`: until the answer's head; for figures, no test reads it.
    """

    status: int
    text: str
    adapter: str
    elapsed_s: float


class Fleet:
    """Three docks and a front."""

    def __init__(self, etcd: Etcd, directory: Path, docks: int = 3) -> None:
        self.etcd = etcd
        self.directory = directory
        *ports, self.port = free_ports(docks + 1)
        self.docks = [Dock(port, etcd, directory / f"dock-{port}") for port in ports]
        self.front = self.start_front(self.port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=HANG_S, trust_env=False)

    def start_front(self, port: int, *options: str) -> Process:
        command = [*LORADOCK, "fleet", "front", "--http", f"127.0.0.1:{port}", *options]
        command += ["--fleet", str(self.etcd.file)]
        return Process(command, self.directory / f"front-{port}.log")

    def __enter__(self) -> Self:
        wait_until(self.is_whole, what="the fleet")
        return self

    def __exit__(self, *exception: object) -> None:
        self.front.kill()
        for dock in self.docks:
            dock.kill()
        self.http.close()

    def is_whole(self) -> bool:
        """Return whether the picker follows all docks, and the proxy serves them."""
        return self.ready(self.http) == len(self.docks) and self.serves(self.http)

    def key(self) -> dict[str, str]:
        """Return the header with the fleet's key."""
        return {"Authorization": f"Bearer {self.etcd.config.key}"}

    def status(self, http: httpx.Client | None = None) -> Any:
        return (http or self.http).get("/fleet/status", headers=self.key()).json()

    def fronts(self) -> dict[str, str]:
        """Return the fronts of the catalogue, and why they don't answer."""
        command = [*LORADOCK, "fleet", "status", "--fleet", str(self.etcd.file), "--json"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return {one["address"]: one["problem"] for one in json.loads(found.stdout)["fronts"]}

    def complete(self, adapter: str = "adapter-0", http: httpx.Client | None = None) -> Answer:
        """Send one completion; the text of its answer is the port of the dock."""
        body = {"model": adapter, "prompt": "x", "max_tokens": 1}
        found = (http or self.http).post("/v1/completions", json=body)
        text = found.json()["choices"][0]["text"] if found.status_code == 200 else found.text
        return Answer(found.status_code, text, adapter, found.elapsed.total_seconds())

    def serves(self, http: httpx.Client) -> bool:
        """Return whether a client's server answers, which may not listen yet."""
        with contextlib.suppress(httpx.ConnectError):
            return self.complete("", http).status == 200
        return False

    def ready(self, http: httpx.Client) -> int:
        """Return how many docks a front knows to be ready; 0 while it does not answer."""
        with contextlib.suppress(httpx.HTTPError, KeyError, json.JSONDecodeError):
            return sum(one["ready"] for one in self.status(http)["docks"].values())
        return 0

    def dock_of(self, port: str) -> Dock:
        """Return the dock that has given an answer."""
        return next(dock for dock in self.docks if str(dock.port) == port)

    def restart(self, dock: Dock) -> None:
        """Start a dock that was killed."""
        self.docks[self.docks.index(dock)] = Dock(dock.port, self.etcd, dock.directory)


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return [Path(words[0]).name, *words[1:]]
    return []


class Clients:
    """Clients that ask one after another until they are stopped; `answers` has all answers."""

    def __init__(self, fleet: Fleet, count: int = 4, adapter: str = "") -> None:
        self._adapter = adapter
        self.answers: list[Answer] = []
        self._fleet = fleet
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        url = self._fleet.url
        with httpx.Client(base_url=url, timeout=HANG_S, trust_env=False) as http:
            while not self._stop.is_set():
                self.answers.append(
                    self._fleet.complete(self._adapter or f"adapter-{number % 4}", http)
                )

    def wait_for(self, more: int) -> None:
        """Wait until as many more requests were answered."""
        count = len(self.answers) + more
        wait_until(lambda: len(self.answers) >= count, lambda: len(self.answers))

    def statuses(self) -> Counter[int]:
        return Counter(one.status for one in self.answers)
