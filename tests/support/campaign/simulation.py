"""A controller, an engine, clients and subscribers on one simulated machine."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from loradock.client.calls import ClientCall
from loradock.controller.core.limits import Limits
from loradock.controller.core.world import World
from loradock.controller.log.format import LogCorrupt, LogError, LogFull, LogSyncFailed
from loradock.controller.log.repair import repair, repair_plan
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import verify
from loradock.controller.log.snapshots import snapshot_paths
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.controller.server.config import ServerConfig
from loradock.messages import requests
from tests.support.campaign.client_process import ClientProcess, Subscriber
from tests.support.campaign.controller_process import (
    DIRECTORY,
    LOG_DIRECTORY,
    ControllerProcess,
    SimulatedTransport,
)
from tests.support.campaign.disk import Flip, SimulatedCrash, SimulatedDisk
from tests.support.campaign.engine_process import EngineConduct, EngineProcess
from tests.support.campaign.history import History
from tests.support.campaign.machine import MACHINE, MS
from tests.support.campaign.network import Link, LinkFaults
from tests.support.campaign.scheduler import Scheduler
from tests.support.simulation.engine_records import Content

NAMES: Final = ("a", "b", "c", "d", "e")
RANKINGS: Final = ("fifo", "sieve", "gdsf", "adaptive")
TURNS_AT_BYTES: Final = (60, 80, 90, 170, 230)
"""In schedules with one of these bounds on host memory, adapters take turns in the slots."""
RESTART_NS: Final = 30 * MS
ENGINE_TIMEOUT_MS: Final = 1_500


class Simulation:
    """All processes of one schedule, and what an operator and a supervisor do for them."""

    def __init__(self, seed: int) -> None:
        MACHINE.reset()
        MACHINE.on_restart = self.kill_engine
        self.scheduler = Scheduler(seed)
        self.rng = rng = self.scheduler.rng
        self.spread_ns = rng.choice((MS // 5, MS // 5, 2 * MS, 20 * MS))
        self.history = History()
        self.limits = random_limits(rng)
        self.files = {
            name: Content(f"content of {name}", rng.randrange(10, 60, 10), rng.randrange(10, 60))
            for name in NAMES
        }
        for name in NAMES:
            self.note_content(name)
        self.changed_names: set[str] = set()
        self.drops_old_files = rng.random() < 0.2
        self.retention = Retention("drop" if self.drops_old_files else "keep", 0.0)
        self.disk = SimulatedDisk(self.scheduler.note, rng)
        self.disk.make_directory(LOG_DIRECTORY)
        self.disk.faults.holes, self.disk.faults.flips = rng.choice(((0, 0), (0.3, 0), (0.3, 0.3)))
        config = ServerConfig(
            str(DIRECTORY),
            self.limits,
            sync="always" if rng.random() < 0.2 else "group",
            segment_bytes_max=rng.choice((2_000, 8_000, 1 << 20)),
            engine_timeout_ms=ENGINE_TIMEOUT_MS,
            checked=rng.random() < 0.1,
            policy=_policy_of(seed),
        )
        self.controller = ControllerProcess(
            *(self.scheduler, config, self.disk, self._new_transport),
            *(self._on_controller_end, self._on_iteration),
        )
        self.conduct = EngineConduct()
        self.engine: EngineProcess | None = None
        self.engines = 0
        self.clients: list[ClientProcess] = []
        self.subscriber: Subscriber | None = None
        self.flipped: Flip | None = None
        self.may_be_corrupt = False
        """Whether power was lost, so that the log may have a hole in what was not synced."""
        self._epoch = 0
        self._client_count = 0
        self._links_to_clients: dict[bytes, Link] = {}
        self._links_from_clients: dict[str, Link] = {}
        self._event_link = self._link(self._on_event_frame, ordered=True)
        self._engine_links: list[Link] = []
        self._engine_connections = 0

    def begin(self, clients: int) -> None:
        """Start the first life of each process."""
        self.start_controller()
        self.start_engine()
        for _ in range(clients):
            self.start_client()
        reader = self.start_client()
        self.clients.remove(reader)
        self.subscriber = Subscriber(reader, may_have_gaps=self.drops_old_files)
        self.subscriber.advance()

    # The controller.

    def start_controller(self, crash_after: int = -1) -> None:
        """Start the controller if it does not run; an operator mends a corrupt log."""
        if self.controller.is_running:
            return
        try:
            if crash_after >= 0:
                self.controller.start_with_crash(crash_after)
            else:
                self.controller.start()
        except SimulatedCrash:
            self._on_controller_end()
        except LogCorrupt:
            self._mend()
            self._on_controller_end()
        except (LogSyncFailed, OSError):
            self._on_controller_end()
        except LogError as error:
            if not self.disk.is_full:
                raise AssertionError(f"the controller does not start: {error}") from error
            self._on_controller_end()
        else:
            self._check_flip()
            self.may_be_corrupt = False
            world = self.controller.world
            # With a full disk, the start itself is logged later.
            if not self.disk.is_full:
                assert world.epoch > self._epoch, f"epoch {world.epoch} after {self._epoch}"
                self._epoch = world.epoch
            self.history.check_recovered(world)
            self.connect_engine()

    def _on_controller_end(self) -> None:
        self.disk.crash()
        self._cut_engine_links()
        delay = RESTART_NS + self.rng.randrange(RESTART_NS)
        self.scheduler.after(delay, self.start_controller)

    def _on_iteration(self, world: World, is_continuous: bool) -> None:
        self.history.check_deadlines(world, is_continuous=is_continuous)

    def set_limits(self, limits: Limits) -> None:
        """Use other limits from the next start on; the engine is started again too."""
        self.limits = limits
        self.controller.config = msgspec.structs.replace(self.controller.config, limits=limits)
        self.kill_engine()

    def kill_controller(self) -> None:
        """Kill the controller's process; its supervisor starts it again."""
        if self.controller.is_running:
            self.controller.kill()
            self._on_controller_end()

    def lose_power(self) -> None:
        """End all processes of the machine, and lose what is not durable."""
        self.scheduler.note("power loss")
        self.kill_engine()
        was_running = self.controller.is_running
        if was_running:
            self.controller.kill()
        self.disk.lose_power()
        self.may_be_corrupt = True
        if was_running:
            self._on_controller_end()

    def _check_flip(self) -> None:
        """Check that a flipped bit is found, if not by a start that need not read it."""
        flip, self.flipped = self.flipped, None
        if flip is None or flip.path.name not in self.disk.names(LOG_DIRECTORY):
            return
        if flip.path.suffix == ".log":
            assert snapshot_paths(LOG_DIRECTORY, self.disk), "a flipped bit was not found"
            assert verify(LOG_DIRECTORY, self.disk).corruption, "a flipped bit was not verified"
        self._undo(flip)

    def _undo(self, flip: Flip) -> None:
        content = self.disk.read(flip.path)
        if content[: len(flip.before)] != flip.before:
            self.disk.flip(flip.path, flip.offset, flip.bit)

    def _mend(self) -> None:
        """Repair a corrupt log as an operator does: a flipped bit is found, and then undone."""
        self.scheduler.note("mend")
        # The process that could not start has ended.
        self.disk.crash()
        flip, self.flipped = self.flipped, None
        if flip is not None:
            plan = repair_plan(LOG_DIRECTORY, self.disk)
            assert plan is not None, f"{flip} is not found by the repair"
            # The operator has a copy: a cut would lose what was acknowledged.
            self._undo(flip)
            return
        assert self.may_be_corrupt, "an intact log is refused as corrupt"
        with suppress(OSError, LogFull):
            repair(LOG_DIRECTORY, self.disk)

    def make_snapshot(self, crash_after: int = -1) -> None:
        """Let the snapshotter work, which is another process; it may crash or find no space."""
        if not self.controller.is_running or not self.controller.snapshot_until:
            return
        order = SnapshotOrder(self.controller.snapshot_until, self.retention)
        with self.disk.other_process(crash_after):
            try:
                make_snapshot(LOG_DIRECTORY, order, self.disk)
            except OSError:
                self.scheduler.note("no snapshot")
            except LogError as error:
                if not (self.flipped or self.disk.fails or self.disk.is_full):
                    raise AssertionError(f"no snapshot is made: {error}") from error

    def _new_transport(self) -> SimulatedTransport:
        history, note = self.history, self.scheduler.note

        def on_reply(client: bytes, frame: bytes) -> None:
            note("reply", frame)
            history.on_reply(client, frame)

        def on_events(frame: bytes) -> None:
            note("events", frame)
            history.on_events(frame)

        transport = SimulatedTransport(on_reply, on_events)
        transport.clients = self._links_to_clients
        transport.subscribers = [self._event_link]
        return transport

    # The engine.

    def start_engine(self, **contents: Any) -> None:
        """Start an engine if none runs."""
        if self.engine is not None and self.engine.is_running:
            return
        self.engines += 1
        self.scheduler.note("start engine")
        progress = self.controller.engine_progress
        self.engine = EngineProcess(self.scheduler, self.engines, self.conduct, progress)
        self.engine.start(self.limits, self.files, **contents)
        self.connect_engine()

    def kill_engine(self) -> None:
        """Kill the engine's process; its supervisor starts another one."""
        engine = self.engine
        if engine is None or not engine.is_running:
            return
        self.scheduler.note("kill engine")
        engine.end()
        self._cut_engine_links()
        self.controller.wakeup.request(MS)
        delay = RESTART_NS + self.rng.randrange(RESTART_NS)
        self.scheduler.after(delay, self.start_engine)

    def connect_engine(self) -> None:
        """Connect the engine to the controller, as by a new connection of its socket."""
        self._cut_engine_links()
        engine, transport = self.engine, self.controller.transport
        if engine is None or not engine.is_running or transport is None:
            return
        self._engine_connections += 1
        name = b"engine-%d" % self._engine_connections

        def to_controller(frame: bytes) -> None:
            if self.controller.transport is transport:
                self.scheduler.note("report", frame)
                transport.reports.append((name, frame))
                self.controller.wakeup.request(0)

        def to_engine(frame: bytes) -> None:
            self.scheduler.note("command", frame)
            engine.receive(frame)

        engine.socket.link = self._link(to_controller, ordered=True)
        transport.engines[name] = self._link(to_engine, ordered=True)
        self._engine_links = [engine.socket.link, transport.engines[name]]
        engine.wakeup.request(0)

    def _cut_engine_links(self) -> None:
        for link in self._engine_links:
            match self.rng.randrange(3):
                case 0:
                    link.cut()
                case 1:
                    link.delay(self.rng.randrange(1, 200 * MS))
        self._engine_links = []
        if self.engine is not None:
            self.engine.socket.link = None
        if self.controller.transport is not None:
            self.controller.transport.engines.clear()

    @property
    def engine_links(self) -> list[Link]:
        """The current connection's links, to and from the controller."""
        return self._engine_links

    def note_content(self, path: str) -> None:
        """Record that an adapter with this path may have the file's present content."""
        content = self.files.get(path)
        if content is not None:
            self.history.fingerprints.setdefault(path, set()).add(content.fingerprint)

    # Clients.

    def start_client(self) -> ClientProcess:
        self._client_count += 1
        name = f"client{self._client_count}"
        route = name.encode()
        client: ClientProcess

        def to_controller(frame: bytes) -> None:
            transport = self.controller.transport
            if transport is None:
                # It waits in the client's socket for the next connection.
                self.scheduler.after(RESTART_NS, lambda: to_controller(frame))
                return
            self.scheduler.note("request", frame)
            transport.requests.append((route, "", frame))
            self.controller.wakeup.request(0)

        def to_client(frame: bytes) -> None:
            client.receive(frame)

        self._links_from_clients[name] = self._link(to_controller)
        self._links_to_clients[route] = self._link(to_client)
        client = ClientProcess(
            *(self.scheduler, name, self._links_from_clients[name]),
            *(self.history.on_request, self._on_settled),
        )
        self.history.scopes[route] = client.scope
        self.clients.append(client)
        return client

    def _on_settled(self, scope: str, call: ClientCall) -> None:
        self.history.on_settled(scope, call)
        if self.subscriber is not None and isinstance(call.request, requests.FetchEvents):
            self.subscriber.advance()

    def _on_event_frame(self, frame: bytes) -> None:
        if self.subscriber is not None:
            self.subscriber.receive(frame)

    # Links.

    @property
    def client_links(self) -> list[Link]:
        """The links of all clients, in both directions."""
        return [
            *self._links_from_clients.values(),
            *self._links_to_clients.values(),
            self._event_link,
        ]

    def _link(self, deliver: Callable[[bytes], None], *, ordered: bool = False) -> Link:
        link = Link(self.scheduler.after, self.rng, deliver, ordered=ordered)
        link.faults = LinkFaults(spread_ns=self.spread_ns)
        return link


def _policy_of(seed: int) -> str:
    """Return the policy of a schedule: `lru` in every second."""
    # Its generator is separate, so that the schedule's other choices are those of `lru`.
    return random.Random(seed).choice(("lru", "lru", "lru", "lru", *RANKINGS))


def random_limits(rng: random.Random) -> Limits:
    """Return limits that are reached soon."""
    slots, on_host = rng.randint(1, 3), rng.randint(0, 3)
    host_bytes = rng.randrange(60, 240, 10)
    return Limits(
        max_loras=slots,
        max_cpu_loras=slots + on_host,
        host_bytes_max=host_bytes,
        pinned_bytes_max=rng.randrange(60, 200, 10),
        device_bytes_max=rng.randrange(60, 200, 10),
        requests_max=rng.choice((4, 64)),
        request_timeout_ms=1_000,
        generation_timeout_ms=1_500,
        operation_timeout_ms=400,
        retry_backoff_ms=50,
        digest_interval=rng.choice((1, 8)),
        turn_tokens=8 * int(host_bytes in TURNS_AT_BYTES),
    )
