"""Two docks whose files differ, all real processes: no output of other files than the catalogue's.

Both have an engine. The second dock has other adapters under two names, and lacks a third.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.transformations import held_out_words, prompt_of
from loradock.gateway.http.errors import CODE_HEADER
from tests.support.fleet.etcd import Etcd, free_ports
from tests.support.fleet.fleets import LORADOCK, Process
from tests.support.parallel.processes import TINY
from tests.support.waiting import HANG_S, wait_until

WORDS = held_out_words(6, seed=1)
OF_SECOND = {"reverse": "upper", "double": "spell"}
"""Name -> the adapter whose files the second dock has."""

NAMES = ("reverse", "double", "devowel")


class Docks:
    """Two docks and a front, with the adapters of the first in the catalogue."""

    def __init__(self, etcd: Etcd, directory: Path) -> None:
        self.etcd, self.directory = etcd, directory
        for name in NAMES:
            self.copy("first", name, name)
        for name, content in OF_SECOND.items():
            self.copy("second", name, content)
        first, second, front = free_ports(3)
        self.ports = {"first": first, "second": second}
        self.processes = {name: self._serve(name, port) for name, port in self.ports.items()}
        command = [*LORADOCK, "fleet", "front", "--http", f"127.0.0.1:{front}"]
        command += ["--fleet", str(etcd.file)]
        self.front = Process(command, directory / "front.log")
        self.url = f"http://127.0.0.1:{front}"
        self.right: dict[tuple[str, str], str] = {}
        """The outputs of the first dock itself."""
        self.http = httpx.Client(timeout=HANG_S, trust_env=False)

    def copy(self, dock: str, name: str, content: str) -> None:
        """Give a dock an adapter's files under a name."""
        place = self.directory / dock / name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(TINY / "adapters" / content, place)

    def _serve(self, name: str, port: int) -> Process:
        command = [*LORADOCK, "--dir", str(self.directory / f"dir-{name}"), "serve"]
        command += ["--model", str(TINY / "model"), "--adapter-root", str(self.directory / name)]
        command += ["--max-loras", "3", "--max-lora-rank", "64", "--pinned-bytes", "16MiB"]
        command += ["--http", f"127.0.0.1:{port}", "--join", str(self.etcd.file)]
        return Process(command, self.directory / f"{name}.log")

    def run(self, dock: str, *words: str) -> None:
        """Run a command on a dock."""
        command = [*LORADOCK, "--dir", str(self.directory / f"dir-{dock}"), *words]
        subprocess.run(command, check=True, capture_output=True, text=True)

    def ask(self, name: str, word: str, url: str = "") -> httpx.Response:
        body = {"model": name, "prompt": prompt_of(word), "temperature": 0, "max_tokens": 40}
        return self.http.post(f"{url or self.url}/v1/completions", json=body)

    def text(self, name: str, word: str, url: str = "") -> str:
        answer = self.ask(name, word, url)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def url_of(self, dock: str) -> str:
        return f"http://127.0.0.1:{self.ports[dock]}"

    def refused(self) -> str:
        """Return what the second dock has logged about adapters that it refuses."""
        lines = self.processes["second"].log.read_text().splitlines()
        return "\n".join(one for one in lines if "an adapter of the fleet is refused" in one)

    def status(self) -> Any:
        headers = {"Authorization": f"Bearer {self.etcd.config.key}"}
        return self.http.get(f"{self.url}/fleet/status", headers=headers).json()

    def are_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            docks = self.status()["docks"].values()
            return len(docks) == len(self.ports) and all(one["ready"] for one in docks)
        return False

    def close(self) -> None:
        for process in (self.front, *self.processes.values()):
            process.kill()
        self.http.close()


@pytest.fixture(scope="module")
def docks(one_etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docks]:
    started = Docks(one_etcd, tmp_path_factory.mktemp("docks"))
    try:
        wait_until(started.are_ready, what="two docks")
        # One name is in the second dock before it is in the catalogue, the other one is not.
        started.run("second", "load", "reverse")
        started.run("first", "load", *NAMES, "--copies", "auto", "--fleet", str(one_etcd.file))
        first = started.url_of("first")
        started.right = {(n, w): started.text(n, w, first) for n in NAMES for w in WORDS}
        yield started
    finally:
        started.close()


def check(docks: Docks) -> None:
    for name in NAMES:
        for word in WORDS:
            assert docks.text(name, word) == docks.right[name, word]


def test_no_output_is_of_other_files_and_every_request_is_answered(docks: Docks) -> None:
    check(docks)

    def has_refused() -> bool:
        # Without the picker, docks are taken in turn, so that the second one is asked, too.
        if picker := docks.front.child("picker"):
            os.kill(picker, signal.SIGKILL)
        check(docks)
        return all(f"adapter={name}" in docks.refused() for name in OF_SECOND)

    wait_until(has_refused, docks.refused)
    wait_until(docks.are_ready, what="a new picker")
    check(docks)


def test_the_dock_refuses_is_left_out_and_says_so(docks: Docks) -> None:
    for name in OF_SECOND:
        answer = docks.ask(name, "hello", docks.url_of("second"))
        assert (answer.status_code, answer.headers[CODE_HEADER]) == (503, "L010"), answer.text
    wait_until(lambda: {*OF_SECOND} <= docks.status()["refusals"].keys(), docks.status)
    second = f"127.0.0.1:{docks.ports['second']}"
    for name, refused in docks.status()["refusals"].items():
        assert refused.keys() == {second}
        docks.ask(name, "hello")
        assert docks.status()["decisions"][-1]["docks"] == [f"127.0.0.1:{docks.ports['first']}"]


def test_a_dock_that_gets_the_right_files_serves_them(docks: Docks) -> None:
    docks.copy("second", "double", "double")
    docks.run("second", "load", "double", "--replace")
    second = docks.url_of("second")
    for word in WORDS:
        assert docks.text("double", word, second) == docks.right["double", word]
    wait_until(lambda: "double" not in docks.status()["refusals"], docks.status)


def test_a_new_version_is_served_by_the_docks_that_have_its_files(docks: Docks) -> None:
    # The second dock has loaded what `reverse` becomes, and has the files of what `double` becomes.
    docks.copy("second", "double", "spell")
    for name, content in OF_SECOND.items():
        docks.copy("first", name, content)
        command = ("load", name, "--replace", "--copies", "auto", "--fleet", str(docks.etcd.file))
        docks.run("first", *command)
        new = {word: docks.text(name, word, docks.url_of("first")) for word in WORDS}
        assert new != {word: docks.right[name, word] for word in WORDS}

        def serves(name: str = name) -> bool:
            return docks.ask(name, WORDS[0], docks.url_of("second")).status_code == 200

        wait_until(serves, docks.refused)
        for word in WORDS:
            for url in (docks.url, docks.url_of("second")):
                assert docks.text(name, word, url) == new[word]
