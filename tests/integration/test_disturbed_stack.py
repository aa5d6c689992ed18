"""A whole server that is disturbed under HTTP and native load, with a check of its history.

A disturbance kills or stops the controller, the engine, the gateway or the supervisor, fills the
controller's disk for some time, or steps its wall clock by up to an hour. Each request uses an
adapter once: at the end, an adapter's `uses` are no fewer than the acknowledged requests (none is
lost) and no more than the requests that were sent (none is done twice). Every output is the one
that its adapter had before the first disturbance. `make disturb-stack ROUNDS=100` makes more.
"""

import asyncio
import os
import random
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from loradock.client import AsyncClient
from loradock.client.calls import Timing
from loradock.messages.errors import ErrorCode, LoradockError
from loradock.messages.requests import StatusShown
from tests.support.engine.serve_process import serve
from tests.support.parallel.processes import ADAPTERS
from tests.support.parallel.ranks import free_port
from tests.support.parallel.replays import assert_replays_equal
from tests.support.parallel.stepped_controller import SteppedClock
from tests.support.waiting import HANG_S

ROUNDS = int(os.environ.get("LORADOCK_ROUNDS", "0"))
SEED = int(os.environ.get("LORADOCK_SEED", "1"))
NATIVE, OVER_HTTP = ADAPTERS[:4], ADAPTERS[4:]
PROCESSES = ("controller", "engine", "gateway", "supervisor")
KINDS = (
    *(f"{action} {name}" for name in PROCESSES for action in ("kill", "stop")),
    "disk",
    "clock",
)
OPTIONS = (
    "--max-loras",
    "3",
    "--max-lora-rank",
    "64",
    "--hang-timeout",
    "2",
    "--digest-interval",
    "16",
)
STOP_S = (0.2, 3.0)
"""Below and above the hang timeout."""

FULL_S = 1.0
CLOCK_STEP_NS_MAX = 3_600_000_000_000
TOKENS = 6
RETRIED = (ErrorCode.ENGINE_GONE, ErrorCode.LOG_UNAVAILABLE, ErrorCode.OVERLOADED)
RETRIED_STATUS = (404, 408, 409, 429, 500, 502, 503, 504)
"""A gateway that has just started may not know an adapter yet."""

_CLOCK = """
import loradock.processes.subprocesses as subprocesses, sys
original = subprocesses.process_command
def stepped(name, config=None):
    command = original(name, config)
    if name != "controller":
        return command
    module = "tests.support.parallel.stepped_controller"
    return [sys.executable, "-m", module, {offset!r}, command[-1]]
subprocesses.process_command = stepped
"""


class History:
    """What clients sent, what was acknowledged, and the output of each adapter."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.acknowledged: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.outputs: dict[str, str] = {}

    def acknowledge(self, adapter: str, output: str) -> None:
        """Record an answer; the first output of an adapter is that of all."""
        self.acknowledged[adapter] += 1
        assert output == self.outputs.setdefault(adapter, output), f"another output of {adapter}"

    def acknowledged_of(self, adapters: tuple[str, ...]) -> int:
        """Return the number of answers."""
        return sum(self.acknowledged[adapter] for adapter in adapters)

    def check(self, uses: dict[str, int]) -> None:
        """Compare the server's counts with the history."""
        for adapter in ADAPTERS:
            assert self.acknowledged[adapter] <= uses[adapter], f"a request of {adapter} is lost"
            assert uses[adapter] <= self.sent[adapter], f"a request of {adapter} was done twice"


class Stack:
    """A server's processes, and what disturbs them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self._offset = directory.with_suffix(".offset")
        self._clock = SteppedClock(self._offset)
        self._running = ExitStack()
        self._supervisor: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the supervisor, which starts the others."""
        prelude = _CLOCK.format(offset=str(self._offset))
        options = (*OPTIONS, "--http", f"127.0.0.1:{self.port}")
        running = serve(self.directory, *options, prelude=prelude)
        self._supervisor = self._running.enter_context(running)

    def close(self) -> None:
        """End all processes."""
        self._running.close()

    def pid(self, name: str) -> int:
        """Return a process's id, 0 if it does not run."""
        if name == "supervisor":
            return self._supervisor.pid
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == self._supervisor.pid and _is_command(command, name):
                return int(path.name)
        return 0

    async def disturb(self, kind: str, rng: random.Random) -> None:
        """Make a disturbance; a process that is not there yet is waited for."""
        action, _, name = kind.partition(" ")
        if action == "clock":
            self._clock.step(rng.randint(-CLOCK_STEP_NS_MAX, CLOCK_STEP_NS_MAX))
            return
        pid = await _eventually(lambda: self.pid(name or "controller"))
        # It may have ended meanwhile: another disturbance has come before its restart.
        with suppress(ProcessLookupError):
            if action == "disk":
                await self._fill_disk(pid)
            elif action == "stop":
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(rng.choice(STOP_S))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
        if kind == "kill supervisor":
            self._supervisor.wait()
            self.start()

    async def _fill_disk(self, pid: int) -> None:
        """Let the process write no byte more for some time."""
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        await asyncio.sleep(FULL_S)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def _is_command(command: list[bytes], name: str) -> bool:
    if name == "controller":
        return b"tests.support.parallel.stepped_controller" in command
    return name.encode() in command


async def _eventually(probe: Callable[[], int]) -> int:
    async with asyncio.timeout(HANG_S):
        while not (found := probe()):
            await asyncio.sleep(0.01)
    return found


class Load:
    """Clients of both protocols, until `is_running` is False."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.history = History()
        self.is_running = True

    async def native(self, number: int) -> None:
        """Send requests as the Python client does, which repeats them under their ids."""
        rng = random.Random(f"{SEED}-{number}")
        async with _client(self.stack.directory) as client:
            while self.is_running:
                await self._ask(client, rng.choice(NATIVE))

    async def _ask(self, client: AsyncClient, adapter: str) -> None:
        self.history.sent[adapter] += 1
        try:
            generation = await client.generate("loradock>", adapter, max_tokens=TOKENS)
            self.history.acknowledge(adapter, await generation.text())
        except LoradockError as error:
            # The engine was lost with its keys and values, or the log could not be written.
            if error.code not in RETRIED:
                raise
            self.history.refused[str(error.code)] += 1
            await asyncio.sleep(0.05)

    async def http(self, number: int) -> None:
        """Send completions; one whose connection ended may have been done."""
        rng = random.Random(f"{SEED}-http-{number}")
        url = f"http://127.0.0.1:{self.stack.port}/v1/completions"
        while self.is_running:
            adapter = rng.choice(OVER_HTTP)
            body = {"model": adapter, "prompt": "loradock>", "max_tokens": TOKENS}
            self.history.sent[adapter] += 1
            try:
                async with httpx.AsyncClient(timeout=HANG_S) as client:
                    response = await client.post(url, json={**body, "temperature": 0})
            except httpx.HTTPError as error:
                self.history.refused[type(error).__name__] += 1
            else:
                assert response.status_code in (200, *RETRIED_STATUS), response.text
                if response.status_code == 200:
                    self.history.acknowledge(adapter, response.json()["choices"][0]["text"])
                    continue
                self.history.refused[str(response.status_code)] += 1
            await asyncio.sleep(0.05)


def _client(directory: Path) -> AsyncClient:
    return AsyncClient(directory, timeout_s=HANG_S, timing=Timing(0.1, 0.4))


def _raise_first(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _disturb(stack: Stack, rounds: int) -> tuple[History, dict[str, int], StatusShown]:
    load, rng = Load(stack), random.Random(SEED)
    history = load.history

    async def progress() -> None:
        """Wait until both protocols have answers that came after this moment."""
        for adapters in (NATIVE, OVER_HTTP):
            before = history.acknowledged_of(adapters)
            async with asyncio.timeout(HANG_S):
                while history.acknowledged_of(adapters) <= before:
                    _raise_first(tasks)
                    await asyncio.sleep(0.01)

    async with _client(stack.directory) as client:
        await asyncio.gather(*(client.load(name) for name in ADAPTERS))
        tasks = [asyncio.create_task(load.native(number)) for number in range(3)]
        tasks += [asyncio.create_task(load.http(number)) for number in range(3)]
        kinds = rng.sample(KINDS, len(KINDS))
        for number in range(rounds):
            await progress()
            # Any moment of a request.
            await asyncio.sleep(rng.random() * 0.1)
            print("disturbance:", kind := kinds[number % len(kinds)])
            await stack.disturb(kind, rng)
        await progress()
        load.is_running = False
        await asyncio.gather(*tasks)
        listed, status = await client.list(), await client.status()
        await client.stop_server()
    return history, {view.adapter: view.uses for view in listed.adapters}, status


@pytest.mark.skipif(not ROUNDS, reason="takes minutes; `make disturb-stack`")
def test_no_disturbance_of_a_server_loses_a_request_or_does_one_twice(tmp_path: Path) -> None:
    print(f"LORADOCK_SEED={SEED} LORADOCK_ROUNDS={ROUNDS}")
    stack = Stack(tmp_path / "d")
    stack.start()
    try:
        history, uses, status = asyncio.run(_disturb(stack, ROUNDS))
        assert stack._supervisor.wait(HANG_S) == 0
    finally:
        stack.close()
    history.check(uses)
    assert_replays_equal(tmp_path / "d", status)
    print(
        f"{ROUNDS} disturbances, {history.sent.total()} requests sent, "
        f"{history.acknowledged.total()} acknowledged, refused: {dict(history.refused)}"
    )
