"""Changed bytes on connections with CURVE, and hostile requests of clients with an allowed key.

`LORADOCK_HOSTILE` is the number of connections, `LORADOCK_SEED` chooses them.
"""

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from loradock.controller.server.keys import KeyStore, new_pair
from loradock.messages import requests as rq
from loradock.messages.ids import GPU_SLOT
from loradock.messages.views import AdapterCounters
from loradock.messages.wire import REQUESTS, TOKEN_BYTES
from loradock.processes.key_files import KeyPair, read_key_pair
from tests.controller.server.test_access import EXAMPLES, named
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation import tampered_connections as tampered
from tests.support.simulation.key_examples import allow, server_key
from tests.support.simulation.malformed_frames import FRAMES
from tests.support.simulation.remote_examples import (
    Remote,
    free_address,
    port_of,
    remote_client,
)
from tests.support.simulation.shell_examples import RawClient, StandInEngine
from tests.support.simulation.tampered_connections import (
    HELLO,
    INITIATE,
    MESSAGE,
    Outcome,
    send_bytes,
    send_through_proxy,
    unchanged,
    with_flipped_bit,
    with_noise,
)
from tests.support.waiting import wait_until

CONNECTIONS = int(os.environ.get("LORADOCK_HOSTILE", "70"))
SEED = int(os.environ.get("LORADOCK_SEED", "1"))
AT_ONCE = 70
PORTS = 3
GROWTH_BYTES_MAX = 96 << 20
"""More than a controller needs for `AT_ONCE` connections, less than many that leak would hold."""

REQUEST = REQUESTS.encode((rq.EvictAdapter("hostile", "nobody"),), token=bytes(TOKEN_BYTES))
GREETINGS = tuple(
    b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + as_server + bytes(31)
    for version in (b"\3\1", b"\3\0", b"\2\0", b"\1\0", b"\xff\xff")
    for mechanism in (b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"\xff" * 20)
    for as_server in (b"\0", b"\1")
)


class Served(NamedTuple):
    """A controller with a remote address, an adapter of each of two tenants, and keys."""

    directory: Path
    address: str
    process: ControllerProcess
    local: RawClient

    @property
    def port(self) -> int:
        return port_of(self.address)

    def wrong_pairs(self) -> tuple[KeyPair, ...]:
        """Return an unknown key, a revoked one, and an allowed one without its secret."""
        store, unknown = KeyStore(self.directory), new_pair()
        key = allow(self.directory, "fired", "administrate")
        remote_client(self.directory, self.address, key).close()
        store.revoke("fired")
        # All remote connections are closed once.
        wait_until(lambda: "key=fired" in self.process.output())
        self.local.status()
        stolen = KeyPair(store.read()[0].public, unknown.secret)
        return unknown, read_key_pair(key), stolen

    def memory_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    directory, address = tmp_path / "d", free_address()
    allow(directory, "witness", "administrate")
    with controller(directory, listen=address, checked=True) as process:
        wait_until((directory / "run" / "engine.sock").exists)
        with StandInEngine(directory, "e", process.pid), RawClient(directory) as local:
            wait_until(lambda: local.status().engine_id)
            for name in ("acme-1", "globex-1"):
                assert local.activate(name).state == GPU_SLOT
            # Only for lack of room may one tenant's requests move another's adapter.
            assert local.call(rq.HoldAdapter("hold", "globex-1")).state == GPU_SLOT
            yield Served(directory, address, process, local)
    # Every refusal is typed: nothing was raised to a loop, and no input failed to be handled.
    for unexpected in ("Traceback", "[error", "[critical", "Assertion"):
        assert unexpected not in process.output(), process.output()


@contextmanager
def answered_throughout(served: Served) -> Iterator[None]:
    """A right client that calls all the time; each call has to be answered as ever."""
    key = allow(served.directory, "witness", "administrate")
    ending, answers, failures = threading.Event(), [0], []

    def call() -> None:
        try:
            with remote_client(served.directory, served.address, key) as witness:
                while not ending.is_set() or not answers[0]:
                    shown = witness.call(rq.ShowAdapter(f"w-{answers[0]}", "globex-1"))
                    assert shown.adapter.state == GPU_SLOT
                    answers[0] += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
        # One that begins after all that was sent.
        goal = answers[0] + 2
        wait_until(lambda: answers[0] >= goal or failures)
    finally:
        ending.set()
        thread.join()
    assert not failures, failures


class Campaign:
    """Connections that a seed chooses; each has a law of its own."""

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._server = server_key(served.directory)
        self._wrong = served.wrong_pairs()
        self._right = read_key_pair(allow(served.directory, "witness", "administrate"))

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def run(self, count: int) -> None:
        """Make `count` connections, some of them at once."""
        kinds = (
            *(self._wrong_key, self._changed_handshake, self._changed_message, self._noise),
            *(self._raw, self._abandoned, self._unchanged),
        )
        for first in range(0, count, AT_ONCE):
            many = range(first, min(count, first + AT_ONCE))
            await asyncio.gather(*(kinds[number % len(kinds)]() for number in many))

    async def _send(
        self, pair: KeyPair | None, edit: Any, port: int = 0, *, ends: bool = False
    ) -> Outcome:
        keys = None if pair is None else (pair, self._server)
        target = port or self._served.port
        return await send_through_proxy(self._context, target, keys, edit, REQUEST, ends=ends)

    async def _unchanged(self) -> None:
        assert await self._send(self._right, unchanged) == Outcome(True, 1)

    async def _wrong_key(self) -> None:
        pair = self._rng.choice((*self._wrong, None))
        place = self._rng.randrange(MESSAGE)
        edit = self._rng.choice((unchanged, with_noise(place, self._rng)))
        port = self._served.port + self._rng.randrange(PORTS)
        assert await self._send(pair, edit, port) == Outcome(False, 0)

    async def _changed_handshake(self) -> None:
        edit = with_flipped_bit(self._rng.choice((HELLO, INITIATE)), self._rng)
        assert await self._send(self._right, edit) == Outcome(False, 0)

    async def _changed_message(self) -> None:
        edit = with_flipped_bit(MESSAGE, self._rng)
        assert await self._send(self._right, edit) == Outcome(True, 0)

    async def _noise(self) -> None:
        # Some of it changes nothing that is read, so the client may be answered.
        edit = with_noise(self._rng.randrange(MESSAGE + 1), self._rng)
        await self._send(self._right, edit, ends=True)

    async def _raw(self) -> None:
        rng = self._rng
        data = rng.choice(
            (
                rng.randbytes(rng.randrange(1, 200)),
                rng.choice(GREETINGS) + rng.randbytes(rng.choice((0, 1, 50, 5000))),
                rng.choice(GREETINGS) + tampered.frame_of(b"\5READY" + bytes(rng.randrange(300))),
                rng.choice(GREETINGS) + b"\6" + (2**40).to_bytes(8, "big") + bytes(2000),
                rng.choice(GREETINGS)[: rng.randrange(64)],
            )
        )
        port = self._served.port + rng.randrange(PORTS)
        received = await send_bytes(port, data, until_closed=True)
        assert b"\5READY" not in received

    async def _abandoned(self) -> None:
        rng = self._rng
        data = rng.choice(GREETINGS)[: rng.randrange(65)]
        await send_bytes(self._served.port + rng.randrange(PORTS), data, until_closed=False)


def test_changed_bytes_admit_no_client_and_disturb_none(served: Served) -> None:
    print(f"LORADOCK_SEED={SEED} LORADOCK_HOSTILE={CONNECTIONS}")
    campaign = Campaign(served, SEED)
    try:
        asyncio.run(campaign.run(AT_ONCE))
        opened, held = served.descriptors(), served.memory_bytes()
        before = views(served)
        with answered_throughout(served):
            asyncio.run(campaign.run(CONNECTIONS))
        assert views(served) == before
        wait_until(lambda: served.descriptors() <= opened + AT_ONCE)
        grown = served.memory_bytes() - held
        print(f"the controller's memory grew by {grown >> 10} KiB")
        assert grown < GROWTH_BYTES_MAX
    finally:
        campaign.close()


def hostile_frames(rng: random.Random) -> Iterator[tuple[bytes, ...]]:
    """Yield malformed messages, and requests of every kind about others with bytes changed."""
    yield from FRAMES.values()
    for number, example in enumerate(EXAMPLES.values()):
        request = msgspec.structs.replace(example, request_id=f"h-{number}")
        if {"adapter", "adapters"} & {*request.__struct_fields__}:
            request = named(request, rng.choice(("globex-1", "globex-9", "acme-1", "..")))
        frame = REQUESTS.encode((request,), token=rng.randbytes(TOKEN_BYTES))
        yield (frame,)
        for _ in range(4):
            changed = bytearray(frame)
            for at in rng.sample(range(len(frame)), rng.randrange(1, 4)):
                changed[at] = rng.randrange(256)
            yield (bytes(changed[: rng.choice((len(frame), rng.randrange(len(frame))))]),)


@pytest.mark.parametrize(
    ("right", "adapters"), [("read", ()), ("operate", ("acme-*",)), ("administrate", ("acme-*",))]
)
def test_hostile_requests_of_an_allowed_key_change_nothing_of_others(
    served: Served, right: Any, adapters: tuple[str, ...]
) -> None:
    print(f"LORADOCK_SEED={SEED}")
    key = allow(served.directory, "hostile", right, *adapters)
    before = views_of_others(served)
    seq = served.local.status().seq
    with answered_throughout(served), remote_client(served.directory, served.address, key) as wrong:
        for number, frames in enumerate(hostile_frames(random.Random(SEED))):
            wrong.socket.send_multipart(frames)
            # It is still read, so all that was sent before has been.
            if number % 16 == 0:
                assert_is_served(wrong, f"s-{number}")
        assert_is_served(wrong, "last")
    assert views_of_others(served) == before
    if right == "read":
        assert served.local.status().seq == seq


def views(served: Served) -> list[rq.AdapterView]:
    """Return all adapters, without the times that continue."""
    return [
        msgspec.structs.replace(one, counters=AdapterCounters())
        for one in served.local.list().adapters
    ]


def views_of_others(served: Served) -> list[rq.AdapterView]:
    return [one for one in views(served) if not one.adapter.startswith("acme-")]


def assert_is_served(client: Remote, request_id: str) -> None:
    """Send a request, and read until its answer; the refusals of others are dropped."""
    client.send(rq.ShowStatus(request_id))
    while (reply := client.reply()).request_id != request_id:
        continue
    assert isinstance(reply, rq.StatusShown)
