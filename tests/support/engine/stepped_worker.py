"""A real controller process and a worker in this process, whose steps a test counts and holds.

`python -m tests.support.engine.stepped_worker` prints how many steps of a busy engine end until a
cold adapter's load is answered, and from then until its first token: counts, without a clock.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import zmq

from loradock import Client
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.engine.worker.engine import Engine
from loradock.engine.worker.process import connect
from loradock.engine.worker.worker import Wakeup, Worker
from loradock.messages.addresses import endpoint
from loradock.messages.commands import StartGeneration
from loradock.messages.ids import BASE_MODEL
from loradock.messages.requests import TokensStreamed
from loradock.processes.key_files import read_key_pair, read_public_key
from tests.support.parallel.processes import LIMITS, TINY, controller
from tests.support.simulation.key_examples import engine_keys
from tests.support.waiting import HANG_S, wait_until

STREAMS: Final = 4
BESIDE_S: Final = 0.05
"""The length of a measured step: many times what the processes need for a round trip."""


class SteppedEngine:
    """An engine that calls `beside` in each step, once it has computed, and counts the steps.

    `first_tokens`: the steps that had ended at the first token of each request of an adapter.
    `deferred`: the kinds of commands that wait for the end of this step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps = 0
        self.beside: Callable[[], Any] = lambda: None
        self.first_tokens: list[int] = []
        self._starting: set[str] = set()
        self.deferred: set[type] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> None:
        if not self._engine.is_idle:
            self._engine.step()
            self.beside()
            self.deferred.clear()
            self.steps += 1

    def submit(self, command: Any) -> None:
        if isinstance(command, StartGeneration) and command.adapter_id != BASE_MODEL:
            self._starting.add(command.request_id)
        self._engine.submit(command)

    def submit_beside(self, command: Any) -> bool:
        is_executed = self._engine.submit_beside(command)
        if not is_executed:
            self.deferred.add(type(command))
        return is_executed

    def poll(self) -> list[Any]:
        reports = self._engine.poll()
        for report in reports:
            if isinstance(report, TokensStreamed) and report.request_id in self._starting:
                self._starting.remove(report.request_id)
                self.first_tokens.append(self.steps)
        return reports


class SteppedWorker:
    """An engine's worker that runs on a thread, and a client of its controller."""

    def __init__(self, engine: SteppedEngine, directory: Path, client: Client) -> None:
        self.engine, self.client = engine, client
        self._directory = directory

    @contextmanager
    def streams(self, count: int = STREAMS) -> Iterator[None]:
        """Let outputs of the base model run."""
        ends = threading.Event()

        def stream() -> None:
            with Client(self._directory, timeout_s=HANG_S) as client:
                while not ends.is_set():
                    for _ in client.generate("word>", max_tokens=200, ignore_eos=True):
                        if ends.is_set():
                            break

        threads = [threading.Thread(target=stream) for _ in range(count)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(self.engine.running) == count, lambda: self.engine.steps)
        try:
            yield
        finally:
            ends.set()
            for thread in threads:
                thread.join()

    def first_token(self, name: str) -> int:
        """Generate with an adapter; return the steps that had ended at its first token."""
        with Client(self._directory, timeout_s=HANG_S) as client:
            next(iter(client.generate("word>", name)))
        return self.engine.first_tokens[-1]

    @contextmanager
    def held_steps(self, *deferred: type) -> Iterator[int]:
        """Hold the next steps until commands of these kinds wait, one for each step.

        Yields the number of steps that had ended when the first one was held.
        """
        holding, kinds = threading.Event(), list(deferred)

        def hold() -> None:
            if kinds:
                holding.set()
                wait_until(lambda: kinds[0] in self.engine.deferred, what=str(kinds[0]))
                del kinds[0]

        self.engine.beside = hold
        assert holding.wait(HANG_S)
        try:
            yield self.engine.steps
        finally:
            kinds.clear()
            self.engine.beside = lambda: None


@contextmanager
def stepped(directory: Path) -> Iterator[SteppedWorker]:
    """Serve the tiny model: the controller is a process, the worker runs on a thread."""
    roots = (TINY / "adapters",)
    config = EngineConfig(TINY / "model", roots, device_bytes_max=LIMITS.device_bytes_max)
    lora = LoRAConfig(max_lora_rank=64, max_loras=LIMITS.max_loras)
    wakeup = Wakeup()
    engine = SteppedEngine(Engine(load_model(config, lora), config, lora, "e" * 32, wakeup.wake))
    keys = engine_keys(directory)
    pair, server = read_key_pair(keys["key"]), read_public_key(keys["server_key"])
    # A step that a test holds is no silence.
    timeout_ms = int(1000 * HANG_S)
    with controller(directory, engine_timeout_ms=timeout_ms), zmq.Context() as context:
        socket = connect(context, endpoint(directory, "engine.sock"), pair, server)
        worker = Worker(engine, socket, wakeup, ())  # type: ignore[arg-type]
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            with Client(directory, timeout_s=HANG_S) as client:
                yield SteppedWorker(engine, directory, client)
        finally:
            engine.beside = lambda: None
            worker.stop()
            wakeup.wake()
            thread.join()
            context.destroy(linger=0)
    engine.close()


def main() -> None:
    """Print the counts of each adapter; the last ones need the slots of others."""
    with TemporaryDirectory() as directory, stepped(Path(directory) / "d") as served:
        engine = served.engine
        with served.streams():
            engine.beside = lambda: time.sleep(BESIDE_S)
            print("adapter    steps until loaded    then until the first token")
            for name in ("caesar", "devowel", "double", "piglatin", "reverse"):
                start = engine.steps
                served.client.load(name)
                loaded = engine.steps
                print(f"{name:9}{loaded - start:15}{served.first_token(name) - loaded:23}")


if __name__ == "__main__":
    main()
