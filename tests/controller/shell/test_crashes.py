"""200 real SIGKILLs of a controller under load, with a real engine that lives on.

Each request is counted by the adapter's `uses` exactly once, whenever the controller dies; so their
sum over the adapters is the number of requests that were acknowledged: fewer would be a lost one,
more one applied twice.
"""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

from controller.client import AsyncClient
from controller.client.calls import Timing
from controller.log.replay import replay
from controller.log.segments import verify
from messages.requests import StatusShown
from tests.support.parallel.processes import ADAPTERS, ROOT, ControllerProcess, controller, engine

KILLS = int(os.environ.get("LORADOCK_KILLS", "200"))
CLIENTS = 6
SEED = int(os.environ.get("LORADOCK_SEED", "1"))
TIMEOUT_S = 120.0


def _client(directory: Path) -> AsyncClient:
    # It asks again soon: most of this test's time is clients waiting for the next life.
    return AsyncClient(directory, timeout_s=TIMEOUT_S, timing=Timing(0.1, 0.4))


class Load:
    """Clients that ask until told to stop, and remember what they were told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.acknowledged = 0
        self.uses = 0
        self.running = True

    async def run(self, number: int) -> None:
        chance = random.Random(f"{SEED}-{number}")
        # Each client has an adapter of its own to hold, and they all fight for the slots.
        own = ADAPTERS[number % len(ADAPTERS)]
        async with _client(self.directory) as client:
            while self.running:
                await self._ask(client, chance, own)

    async def _ask(self, client: AsyncClient, chance: random.Random, own: str) -> None:
        other = chance.choice(ADAPTERS)
        match chance.randrange(4):
            case 0:
                await client.load(own)
                self.uses += 1
            case 1:
                await client.stage(own)
                self.uses += 1
            case 2:
                await client.activate(other)
                self.uses += 1
            case 3:
                generation = await client.generate("loradock>", other, max_tokens=4)
                assert len((await generation.text()).encode()) <= 4
                self.uses += 1
        self.acknowledged += 1


async def _crash_under_load(directory: Path, process: ControllerProcess) -> tuple[Load, list[int]]:
    load = Load(directory)
    chance = random.Random(SEED)
    async with _client(directory) as client:
        await asyncio.gather(*(client.load(name) for name in ADAPTERS))
        load.uses += len(ADAPTERS)
        tasks = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
        for _ in range(KILLS):
            goal = load.acknowledged + chance.randrange(1, 12)
            while load.acknowledged < goal:
                _raise_first(tasks)
                await asyncio.sleep(0.001)
            # Not between two acknowledgements only: anywhere in what follows one.
            await asyncio.sleep(chance.random() * 0.01)
            process.kill()
            process.start()
        load.running = False
        await asyncio.gather(*tasks)
        listed, status = await client.list(), await client.status()
    return load, [view.uses for view in listed.adapters], status


def _raise_first(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def test_two_hundred_kills_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    print(f"LORADOCK_SEED={SEED} LORADOCK_KILLS={KILLS}")
    directory = tmp_path / "d"
    directory.mkdir()
    with controller(directory) as process, engine(directory):
        load, uses, status = asyncio.run(_crash_under_load(directory, process))
        assert process.stop() == 0
    assert sum(uses) == load.uses
    assert load.acknowledged >= KILLS
    assert status.epoch
    _assert_replays_equal(directory, status)


def _assert_replays_equal(directory: Path, status: StatusShown) -> None:
    verdict = verify(directory / "log")
    assert verdict.damage is None
    result = replay(directory / "log", until=status.seq, checked=False)
    assert result.divergence is None
    assert result.digests_compared > 0
    assert result.digest == status.digest
    assert _replay_elsewhere(directory, status.seq) == status.digest


def _replay_elsewhere(directory: Path, until: int) -> str:
    """The digest that another process with another hash seed finds."""
    code = (
        "import sys; from pathlib import Path; from controller.log.replay import replay; "
        "print(replay(Path(sys.argv[1]), int(sys.argv[2])).digest)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory / "log"), str(until)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
