"""Disturbances of a controller under load, with a real engine that keeps running.

A disturbance is a SIGKILL, a SIGSTOP of controller or engine for some time, or a step of the wall
clock by up to an hour. Each request increments an adapter's `uses` exactly once, at any moment of
any of them. Their sum over the adapters is the number of acknowledged requests: a smaller sum is a
lost request, a larger one a request that was applied twice.
"""

import asyncio
import os
import random
import signal
from pathlib import Path

from loradock.client import AsyncClient
from loradock.client.calls import NO_ID, ClientCall, Timing
from loradock.client.session import Session
from loradock.messages.errors import UnknownAdapter
from loradock.messages.requests import (
    PrefetchAdapter,
    ReleaseAdapter,
    Request,
    ShowStatus,
    StatusShown,
)
from tests.support.parallel.processes import ADAPTERS, ControllerProcess, controller, engine
from tests.support.parallel.replays import assert_replays_equal
from tests.support.parallel.stepped_controller import SteppedClock
from tests.support.simulation.shell_examples import RawClient, logged
from tests.support.waiting import HANG_S

DISTURBANCES = int(os.environ.get("LORADOCK_DISTURBANCES", "100"))
CLOCK_STEP_NS_MAX = 3_600_000_000_000
PAUSE_S_MAX = 0.1
CLIENTS = 6
SNAPSHOT_INTERVAL = 1_000
"""A run has many snapshots, and kills while one is made; without them a start takes ever longer."""
SEED = int(os.environ.get("LORADOCK_SEED", "1"))


def _client(directory: Path) -> AsyncClient:
    # Short retries: most of this test's time is clients that wait for the next start. Output that
    # is late, because the machine is, is not lost.
    timing = Timing(0.1, 0.4, lost_tokens_s=HANG_S)
    return AsyncClient(directory, timeout_s=HANG_S, timing=timing)


class Load:
    """Clients that send requests until `running` is False, and count the acknowledged ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.acknowledged = 0
        self.uses = 0
        self.running = True

    async def run(self, number: int) -> None:
        rng = random.Random(f"{SEED}-{number}")
        # Each client loads an adapter of its own; all clients compete for the slots.
        own = ADAPTERS[number % len(ADAPTERS)]
        async with _client(self.directory) as client:
            while self.running:
                await self._send_request(client, rng, own)

    async def _send_request(self, client: AsyncClient, rng: random.Random, own: str) -> None:
        other = rng.choice(ADAPTERS)
        match rng.randrange(4):
            case 0:
                await client.load(own)
            case 1:
                await client.stage(own)
            case 2:
                await client.activate(other)
                self.uses += 1
            case 3:
                generation = await client.generate("loradock>", other, max_tokens=4)
                assert len((await generation.text()).encode()) <= 4
                self.uses += 1
        self.acknowledged += 1


class Disturbances:
    """Chooses and makes disturbances of the two processes; three of five are kills."""

    def __init__(self, process: ControllerProcess, engine_pid: int, clock: SteppedClock) -> None:
        self.counts = dict.fromkeys(("kill", "pause", "step"), 0)
        self._process = process
        self._engine_pid = engine_pid
        self._clock = clock
        self._rng = random.Random(SEED)

    @property
    def requests_before_next(self) -> int:
        """The number of acknowledgements to wait for."""
        return self._rng.randrange(1, 12)

    async def make(self) -> None:
        # It may come at any moment after an acknowledgement.
        await asyncio.sleep(self._rng.random() * 0.01)
        kind = self._rng.choice(("kill", "kill", "kill", "pause", "step"))
        self.counts[kind] += 1
        match kind:
            case "kill":
                self._process.kill()
                self._process.start()
            case "pause":
                await self._pause()
            case "step":
                self._clock.step(self._rng.randint(-CLOCK_STEP_NS_MAX, CLOCK_STEP_NS_MAX))

    async def _pause(self) -> None:
        pid = self._rng.choice((self._process.pid, self._engine_pid))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.random() * PAUSE_S_MAX)
        os.kill(pid, signal.SIGCONT)


async def _disturb_under_load(
    directory: Path, disturbances: Disturbances
) -> tuple[Load, list[int], StatusShown]:
    load = Load(directory)
    async with _client(directory) as client:
        await asyncio.gather(*(client.load(name) for name in ADAPTERS))
        tasks = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
        for _ in range(DISTURBANCES):
            goal = load.acknowledged + disturbances.requests_before_next
            while load.acknowledged < goal:
                _raise_first(tasks)
                await asyncio.sleep(0.001)
            await disturbances.make()
        load.running = False
        await asyncio.gather(*tasks)
        listed, status = await client.list(), await client.status()
    return load, [view.uses for view in listed.adapters], status


def _raise_first(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def test_disturbances_lose_no_request_and_repeat_none(tmp_path: Path) -> None:
    print(f"LORADOCK_SEED={SEED} LORADOCK_DISTURBANCES={DISTURBANCES}")
    directory, offset = tmp_path / "d", tmp_path / "offset"
    directory.mkdir()
    clock = SteppedClock(offset)
    options = {"snapshot_interval": SNAPSHOT_INTERVAL}
    with controller(directory, offset, **options) as process, engine(directory) as engine_process:
        disturbances = Disturbances(process, engine_process.pid, clock)
        load, uses, status = asyncio.run(_disturb_under_load(directory, disturbances))
        assert process.stop() == 0
    assert sum(uses) == load.uses
    assert load.acknowledged >= DISTURBANCES
    assert status.epoch
    assert DISTURBANCES < 30 or min(disturbances.counts.values()) > 0
    assert_replays_equal(directory, status)


KILLS = 10


def test_a_copy_of_a_refused_frame_is_never_executed(tmp_path: Path) -> None:
    """It arrives after a kill, at a controller that would not refuse it; a refusal is in no log."""
    directory = tmp_path / "d"
    directory.mkdir()
    copies: list[bytes] = []
    refused: dict[str, ClientCall] = {}
    with controller(directory) as process, RawClient(directory) as raw:
        session = Session(raw.token, Timing())
        for number in range(KILLS):
            name = f"adapter-{number}"
            call, sent = _settle(session, raw, ReleaseAdapter(NO_ID, name))
            assert isinstance(call.outcome, UnknownAdapter)
            copies += sent
            refused[call.request_id] = call
            process.kill()
            process.start()
            _settle(session, raw, PrefetchAdapter(NO_ID, name, "", "cpu-cached"))
            for copy in copies:
                raw.send(copy)
            replies = raw.replies_until(ShowStatus(raw.new_id()))
            assert not refused.keys() & {reply.request_id for reply in replies}
        assert process.stop() == 0
    done = logged(directory)
    assert sum(isinstance(message, PrefetchAdapter) for message in done) == KILLS
    assert not any(isinstance(message, ReleaseAdapter) for message in done)
    print(f"{len(copies)} copies of {KILLS} refused requests were sent, and none was executed")


def _settle(session: Session, raw: RawClient, request: Request) -> tuple[ClientCall, list[bytes]]:
    """Return a call with its answer, and the frames that were sent for it."""
    now, sent = 0.0, []
    call = session.begin(request, now, HANG_S)
    while not call.settled:
        for frame in session.due(now):
            raw.send(frame)
            sent.append(frame)
        if raw.socket.poll(50):
            session.receive(raw.receive(), now)
        else:
            now += 0.05
    return call, sent
