"""The demo of a fleet (`make fleet-demo`): three docks, three members of etcd, two fronts.

All are real processes of this machine. Clients request eight adapters through both fronts; a dock
is killed under load, then a front. Every output is compared with the transformation for which its
adapter was trained. It exits with 0 only if no request was lost and no output was wrong.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from examples.demo import OUTPUT_TOKENS_MAX, START_TIMEOUT_S, TINY, WORDS_SEED, _free_port
from examples.transformations import TRANSFORMATIONS, answer_of, held_out_words, prompt_of
from loradock.cli.serve.children import process_tree
from loradock.fleet.config import read_config
from loradock.fleet.setup import Member, etcd_command, write_fleet

LORADOCK = str(Path(sys.executable).parent / "loradock")
DOCKS, MEMBERS, FRONTS = 3, 3, 2
CLIENTS = 6
REQUESTS = 360
ATTEMPTS = 5


class Machines:
    """All processes, which end with the `with` block; their logs are in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.members = _members()
        write_fleet(directory, self.members, "demo")
        self.file = directory / "fleet.toml"
        self.docks: dict[str, subprocess.Popen[bytes]] = {}
        self.fronts: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Machines":
        for member in self.members:
            state = self.directory / member.name
            command = etcd_command(self.members, member, self.directory, state, "demo")
            self._start(member.name, command)
        for _ in range(DOCKS):
            address = f"127.0.0.1:{_free_port()}"
            self.docks[address] = self._start(f"dock-{address}", self._serve(address))
        for _ in range(FRONTS):
            address = f"127.0.0.1:{_free_port()}"
            command = [LORADOCK, "fleet", "front", "--http", address, "--fleet", str(self.file)]
            self.fronts[address] = self._start(f"front-{address}", command)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def directory_of(self, address: str) -> Path:
        """Return the directory of a dock's controller."""
        return self.directory / address.rpartition(":")[2]

    def run(self, *words: str) -> Any:
        """Run a command of the fleet; return its JSON."""
        command = [LORADOCK, *words, "--fleet", str(self.file), "--json"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise RuntimeError(f"{' '.join(words)}: {found.stdout}{found.stderr}")
        return found.stdout

    def _serve(self, address: str) -> list[str]:
        command = [LORADOCK, "--dir", str(self.directory_of(address)), "serve"]
        command += ["--model", str(TINY / "model"), "--adapter-root", str(TINY / "adapters")]
        command += ["--max-loras", "3", "--max-lora-rank", "64", "--pinned-bytes", "16MiB"]
        return [*command, "--http", address, "--join", str(self.file)]

    def _start(self, name: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._stack.callback(kill, process)
        return process


def _members() -> list[Member]:
    """Return members of etcd at free ports, each with a free one after it."""
    return [Member("127.0.0.1", _free_port()) for _ in range(MEMBERS)]


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all that it has started."""
    for pid in process_tree(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true result; raises `TimeoutError`."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        with suppress(httpx.HTTPError, RuntimeError, KeyError, ValueError):
            if found := condition():
                return found
        time.sleep(0.3)
    raise TimeoutError(f"{what}: not there within {START_TIMEOUT_S:.0f} s")


class Traffic:
    """Requests of several clients, each to any front; one that fails is sent to another."""

    def __init__(self, fronts: Sequence[str]) -> None:
        self.fronts = list(fronts)
        self.answered = self.again = 0
        self.wrong: list[str] = []
        self.lost: list[str] = []

    def send(self, work: list[tuple[str, str]]) -> None:
        """Send requests until none is left."""
        with httpx.Client(timeout=START_TIMEOUT_S, trust_env=False) as http:
            while work:
                with suppress(IndexError):
                    self._send(http, *work.pop())

    def _send(self, http: httpx.Client, name: str, word: str) -> None:
        body = {"model": name, "prompt": prompt_of(word), "temperature": 0}
        body["max_tokens"] = OUTPUT_TOKENS_MAX
        problem = ""
        for attempt in range(ATTEMPTS):
            front = self.fronts[(self.answered + attempt) % len(self.fronts)]
            try:
                answer = http.post(f"http://{front}/v1/completions", json=body)
                output = answer.raise_for_status().json()["choices"][0]["text"]
            except httpx.HTTPError as error:
                self.again += 1
                problem = str(error)
                continue
            self.answered += 1
            if output != (expected := answer_of(name, word)):
                self.wrong.append(f"{name}({word}) = {output!r}, not {expected!r}")
            return
        self.lost.append(f"{name}({word}): {problem}")


def main() -> int:
    """Run the demo; returns 0 if all checks passed, else 1."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    if shutil.which("etcd") is None:
        console.print("etcd is not installed: apt-get install etcd-server")
        return 1
    console.rule("LoRADock: three docks, three members of etcd, two fronts")
    with tempfile.TemporaryDirectory() as name, Machines(Path(name)) as machines:
        key = read_config(machines.file).key
        for front in machines.fronts:
            wait_for(lambda front=front: _are_ready(front, key), f"docks of {front}")
        first = next(iter(machines.docks))
        machines.run(
            "--dir", str(machines.directory_of(first)), "load", "--all", "--copies", "auto"
        )
        console.print(f"{DOCKS} docks are ready; {len(TRANSFORMATIONS)} adapters are wanted.")
        traffic = _traffic(machines, console)
        return _report(console, machines, traffic)


def _are_ready(front: str, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    shown = httpx.get(f"http://{front}/fleet/status", headers=headers).json()["docks"]
    return len(shown) == DOCKS and all(one["ready"] for one in shown.values())


def _traffic(machines: Machines, console: Console) -> Traffic:
    words = held_out_words(REQUESTS // len(TRANSFORMATIONS), seed=WORDS_SEED)
    work = [(name, word) for name in TRANSFORMATIONS for word in words]
    random.Random(WORDS_SEED).shuffle(work)
    traffic, began = Traffic([*machines.fronts]), time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(traffic.send, work) for _ in range(CLIENTS)]
        for share, kind, processes in (
            (1 / 3, "dock", machines.docks),
            (2 / 3, "front", machines.fronts),
        ):
            while traffic.answered < share * REQUESTS and not all(one.done() for one in running):
                time.sleep(0.05)
            address, process = list(processes.items())[-1]
            kill(process)
            console.print(
                f"  [bold red]{kind} {address} killed[/] after {traffic.answered} answers"
            )
        for one in running:
            one.result()
    console.print(f"{traffic.answered} answers in {time.monotonic() - began:.0f} s")
    return traffic


def _report(console: Console, machines: Machines, traffic: Traffic) -> int:
    status = json.loads(machines.run("fleet", "status"))
    picker = next(one["picker"] for one in status["fronts"] if one["picker"])
    reasons = Counter(one["reason"] for one in picker["decisions"])
    for name, docks in sorted(picker["copies"].items()):
        console.print(f"  {name:10} in slots of {', '.join(docks)}")
    console.print(f"last decisions: {dict(reasons)}")
    console.print(
        f"requests: {traffic.answered} answered, {len(traffic.lost)} lost, "
        f"{len(traffic.wrong)} wrong; {traffic.again} sent again by clients, after the front's end"
    )
    for line in (*traffic.lost, *traffic.wrong)[:10]:
        console.print(f"  [red]failed[/] {line}")
    total = REQUESTS // len(TRANSFORMATIONS) * len(TRANSFORMATIONS)
    return 0 if traffic.answered == total and not traffic.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
