"""The ways through the running program: files entered and calls made, counted without a clock.

`make walk` prints the table and stores it in `tests/golden/walk.json`, which a test compares with.

`loradock serve --http` runs on the tiny model with a profile in each process (see
`tests/support/walk/sitecustomize.py`). Every walk is made several times, and a function belongs to
it if each of them called it and the idle server does not, so what timers call is not counted,
however long a walk takes. Functions of libraries are not counted.
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from loradock import Client
from tests.support.engine.serve_process import serve, wait_for_gateway
from tests.support.sources import ROOT
from tests.support.waiting import HANG_S

STORED: Final = ROOT / "tests" / "golden" / "walk.json"
OPTIONS: Final = ("--max-loras", "6", "--max-lora-rank", "64", "--http", "127.0.0.1:0")
PROCESSES: Final = ("gateway", "controller", "engine")
ADAPTER: Final = "upper"
COLD: Final = ("caesar", "devowel", "double", "piglatin")
ROUNDS: Final = 10
IDLE_S: Final = 3.0
"""A walk on a slow machine takes two seconds: timers of longer periods are not in each."""
RUNS: Final = 3
"""The largest figure of some runs is stored: what falls into one group of inputs differs."""
SHORT, LONG = 8, 40
LAYER_ROOMS: Final = ("engine/layers/", "engine/punica/", "engine/kernels/")
WRAPPED_LAYERS: Final = 17
"""Of the tiny model: four in each of its four blocks, and the head."""

Calls = Counter[tuple[str, str]]
"""Calls of each function: its file and its name."""


class Processes:
    """The processes of a server, and the calls in each of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pids = {
            name: int(path.stem)
            for path in directory.glob("*.sock")
            for name in PROCESSES
            if name in _arguments(int(path.stem))
        }
        assert set(self._pids) == set(PROCESSES)
        before = self.calls()
        time.sleep(IDLE_S)
        self._idle = {name: set(calls - before[name]) for name, calls in self.calls().items()}

    def calls(self) -> dict[str, Calls]:
        """Return all calls so far, for each process."""
        return {name: _counter(self._ask(pid)["calls"]) for name, pid in self._pids.items()}

    def published(self) -> list[Calls]:
        """Return the ways in the controller from a report to its published events."""
        return [
            Counter(map(tuple, way)) for way in self._ask(self._pids["controller"])["published"]
        ]

    def walk(self, action: Callable[[int], Any], rounds: int) -> dict[str, Calls]:
        """Return the calls that each round of an action made, for each process."""
        walks = []
        for number in range(rounds):
            before = self.calls()
            action(number)
            after = self.calls()
            walks.append({name: after[name] - before[name] for name in PROCESSES})
        return {
            name: _common([calls[name] for calls in walks], self._idle[name]) for name in PROCESSES
        }

    def _ask(self, pid: int) -> dict[str, Any]:
        own = self._directory / "answered"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.settimeout(HANG_S)
            asking.bind(str(own))
            asking.sendto(b".", str(self._directory / f"{pid}.sock"))
            asking.recv(1)
        own.unlink()
        return json.loads((self._directory / "answer.json").read_text())


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _counter(calls: list[tuple[str, str, int]]) -> Calls:
    counter: Calls = Counter()
    for file, function, count in calls:
        counter[file, function] += count
    return counter


def _common(walks: list[Calls], idle: Set[tuple[str, str]] = frozenset()) -> Calls:
    common = walks[0]
    for calls in walks[1:]:
        common = common & calls
    return Counter({function: count for function, count in common.items() if function not in idle})


def _files(*calls: Calls) -> int:
    return len({file for found in calls for file, _ in found})


@contextmanager
def served(directory: Path) -> Iterator[tuple[Processes, httpx.Client, Client]]:
    """Serve the tiny model with a profile in each process, and an engine attached.

    What an idle server does without an engine is less than what it does with one.
    """
    walk = directory / "walk"
    walk.mkdir()
    os.environ |= {"LORADOCK_WALK": str(walk), "PYTHONPATH": str(ROOT / "tests/support/walk")}
    try:
        with serve(directory / "d", *OPTIONS):
            url = wait_for_gateway(directory / "d")
            with (
                Client(directory / "d", timeout_s=HANG_S) as client,
                httpx.Client(base_url=url, timeout=HANG_S) as http,
            ):
                yield Processes(walk), http, client
    finally:
        del os.environ["LORADOCK_WALK"], os.environ["PYTHONPATH"]


def measure(directory: Path) -> dict[str, int]:
    """Return the figures of every walk."""
    with served(directory) as (processes, http, client):

        def complete(tokens: int) -> None:
            body = {"model": ADAPTER, "prompt": "word>", "max_tokens": tokens, "ignore_eos": True}
            response = http.post("v1/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == tokens

        client.activate(ADAPTER)
        http.post("v1/load_lora_adapter", json={"lora_name": ADAPTER, "lora_path": ADAPTER})
        complete(SHORT)
        first = processes.walk(lambda _: complete(1), ROUNDS)
        short = processes.walk(lambda _: complete(SHORT), ROUNDS)["engine"]
        long = processes.walk(lambda _: complete(LONG), ROUNDS)["engine"]
        client.activate("reverse")
        before = len(processes.published())
        cold = processes.walk(lambda number: client.activate(COLD[number]), len(COLD))
        published = _common(processes.published()[before:])
    step = {name: (long[name] - short[name]) // (LONG - SHORT) for name in long}
    layers = sum(calls for (file, _), calls in step.items() if file.startswith(LAYER_ROOMS))
    return {
        "completion: functions": sum(map(len, first.values())),
        "completion: files": _files(*first.values()),
        **{f"completion: files of the {name}": _files(first[name]) for name in PROCESSES},
        "decode step: calls": sum(step.values()),
        "decode step: calls for each wrapped layer": round(layers / WRAPPED_LAYERS),
        "cold adapter: functions": sum(map(len, cold.values())),
        "cold adapter: files": _files(cold["controller"], cold["engine"]),
        "event, from its report: files": _files(published),
    }


def main() -> None:
    """Print the figures of some runs next to the stored ones, and store them."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    measured = []
    for _ in range(RUNS):
        with TemporaryDirectory(prefix="walk-") as directory:
            measured.append(measure(Path(directory)))
    figures = {name: max(one[name] for one in measured) for name in measured[0]}
    print(f"{'':44}{'stored':>8}{'now':>8}")
    for name, value in figures.items():
        print(f"{name:44}{stored.get(name, '-'):>8}{value:>8}")
    STORED.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
