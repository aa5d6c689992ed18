"""Faults of a schedule: each schedule has a random selection, at random times.

A selection per schedule finds more than all faults together, because frequent faults hide the
effects of others (swarm testing).
"""

import random
from collections.abc import Callable
from typing import Any, Final

from loradock.messages import reports, requests
from tests.support.campaign.machine import MACHINE, MS, POISON_PATH, SECOND
from tests.support.campaign.network import LinkFaults
from tests.support.campaign.simulation import NAMES, Simulation, random_limits
from tests.support.campaign.workload import Workload
from tests.support.simulation.engine_records import Content

_HOUR_NS: Final = 3_600 * SECOND
DELAY_NS_MAX: Final = SECOND + 10 * MS
"""Bound on the latency of a frame."""

_PAUSES_NS: Final = (5 * MS, 20 * MS, 100 * MS, 500 * MS, 2 * SECOND)


class Nemesis:
    """The faults of one simulation, until `heal`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng: random.Random = simulation.rng
        self._is_healed = False
        self.workloads = [Workload(simulation, client) for client in simulation.clients]
        theme = self._rng.choice(_THEMES)
        self._faults = self._rng.sample(theme, self._rng.randint(0, min(6, len(theme))))
        self._pause_ns = self._rng.choice(_PAUSES_NS)
        simulation.scheduler.note(f"faults {self._faults}")
        self._disturb_later()

    def _disturb_later(self) -> None:
        if self._faults:
            delay = int(self._pause_ns * 2 * self._rng.random())
            self._simulation.scheduler.after(delay, self._disturb)

    def _disturb(self) -> None:
        if self._is_healed:
            return
        fault = self._rng.choice(self._faults)
        self._simulation.scheduler.note(f"fault {fault}")
        _FAULTS[fault](self)
        self._disturb_later()

    def heal(self) -> None:
        """End all faults and all new requests; start what does not run."""
        simulation, self._is_healed = self._simulation, True
        for workload in self.workloads:
            workload.is_stopped = True
        simulation.spread_ns = MS // 5
        for link in (*simulation.client_links, *simulation.engine_links):
            link.faults, link.is_partitioned = LinkFaults(), False
        simulation.disk.heal()
        conduct = simulation.conduct
        conduct.failure, conduct.duration_ns, conduct.false_inventories = 0.0, 2 * MS, 0
        conduct.forgetting = 0.0
        MACHINE.hides_processes = False
        for name in NAMES:
            simulation.files.setdefault(name, Content(f"content of {name}", 10, 10))
        simulation.controller.wakeup.resume()
        engine = simulation.engine
        if engine is not None:
            engine.wakeup.resume()
            if engine.is_hung:
                simulation.kill_engine()
        if engine is not None and engine.is_running and engine.socket.link is None:
            simulation.connect_engine()

    # Faults.

    def _later(self, undo: Callable[[], None]) -> None:
        delay = self._rng.choice((10 * MS, 200 * MS, 3 * SECOND))
        self._simulation.scheduler.after(delay, undo)

    def kill_controller(self) -> None:
        self._simulation.kill_controller()

    def crash_in_disk_operation(self) -> None:
        simulation = self._simulation
        if simulation.controller.is_running:
            simulation.disk.crash_after = self._rng.randrange(4)

    def crash_in_recovery(self) -> None:
        simulation = self._simulation
        if simulation.controller.is_running:
            simulation.controller.kill()
            simulation.start_controller(self._rng.randrange(6))

    def lose_power(self) -> None:
        self._simulation.lose_power()

    def pause_controller(self) -> None:
        if self._simulation.controller.is_running:
            self._simulation.controller.wakeup.hold(self._rng.randrange(4 * SECOND))

    def kill_engine(self) -> None:
        MACHINE.hides_processes = self._rng.random() < 0.3
        self._simulation.kill_engine()

    def hang_engine(self) -> None:
        """Hang the engine; its supervisor kills it after some time."""
        simulation, engine = self._simulation, self._simulation.engine
        if engine is None or not engine.is_running:
            return
        engine.is_hung = True

        def end() -> None:
            if simulation.engine is engine:
                simulation.kill_engine()

        simulation.scheduler.after(self._rng.randrange(4 * SECOND), end)

    def pause_engine(self) -> None:
        engine = self._simulation.engine
        if engine is not None and engine.is_running:
            engine.wakeup.hold(self._rng.randrange(5 * SECOND))

    def slow_engine(self) -> None:
        conduct = self._simulation.conduct
        conduct.duration_ns = self._rng.choice((2 * MS, 50 * MS, 300 * MS, 1_500 * MS))

    def failing_engine(self) -> None:
        self._simulation.conduct.failure = self._rng.choice((0.0, 0.3, 0.9))

    def forgetful_engine(self) -> None:
        """Let the engine never end some operations: it has to be restarted."""
        self._simulation.conduct.forgetting = self._rng.choice((0.0, 0.1, 0.5))

    def false_reports(self) -> None:
        """Let the engine send a report that the controller has to refuse."""
        engine = self._simulation.engine
        if engine is None or not engine.is_running or engine.socket.link is None:
            return
        running = sorted(engine.engine.model.running)
        report: Any
        match self._rng.randrange(4):
            case 0:
                frame = self._rng.randbytes(self._rng.randrange(60))
            case 1:
                report = reports.WeightsDropped(10_000 + self._rng.randrange(1000))
                frame = engine.worker._link.encode(report)
            case 2 if running:
                frame = engine.worker._link.encode(_wrong_report(engine.engine.model, running[0]))
            case _:
                self._simulation.conduct.false_inventories = self._rng.randint(1, 2)
                engine.worker._link.needs_sync = True
                return
        engine.socket.link.send(frame)

    def malformed_requests(self) -> None:
        transport = self._simulation.controller.transport
        if transport is not None:
            frame = self._rng.randbytes(self._rng.randrange(60))
            transport.requests.append((b"malformed", "", frame))
            self._simulation.controller.wakeup.request(0)

    def poison(self) -> None:
        """Let a client send a request whose handling raises, after it has changed the state."""
        client = self._rng.choice(self._simulation.clients)
        client.begin(requests.LoadAdapter("", self._rng.choice(NAMES), POISON_PATH))

    def cut_engine_connection(self) -> None:
        self._simulation.connect_engine()

    def partition_engine(self) -> None:
        """Lose everything in one or both directions, until another connection is made."""
        links = self._simulation.engine_links
        for link in links if self._rng.random() < 0.5 else links[:1]:
            link.is_partitioned = True
        self._later(self._simulation.connect_engine)

    def lossy_engine_link(self) -> None:
        """Lose commands, as a full queue does; reports are lost with their connection only."""
        spread_ns = self._rng.choice((1, 5, 50)) * MS
        loss = self._rng.choice((0.0, 0.05, 0.3))
        for place, link in enumerate(self._simulation.engine_links):
            link.faults = LinkFaults(loss if place else 0.0, 0.1, spread_ns)

    def partition_clients(self) -> None:
        links = self._simulation.client_links
        for link in links:
            link.is_partitioned = self._rng.random() < 0.5

        def end() -> None:
            for link in links:
                link.is_partitioned = False

        self._later(end)

    def lossy_client_links(self) -> None:
        for link in self._simulation.client_links:
            link.faults = LinkFaults(
                self._rng.choice((0.0, 0.1, 0.5)),
                self._rng.choice((0.0, 0.3)),
                self._rng.choice((0, 1, 100, 1000)) * MS,
            )

    def fail_syncs(self) -> None:
        self._simulation.disk.fail_next(self._rng.randint(1, 3), "sync", "sync_data")

    def fail_writes(self) -> None:
        self._simulation.disk.fail_next(1, "create", "write", "cut", "rename", "remove")

    def fill_disk(self) -> None:
        self._simulation.disk.fill()
        self._later(self._simulation.disk.empty)

    def flip_bit(self) -> None:
        """Flip a bit of the log while no controller runs; the next start has to find it."""
        simulation = self._simulation
        if simulation.flipped is None:
            simulation.kill_controller()
            simulation.flipped = simulation.disk.flip_bit()

    def make_snapshot(self) -> None:
        crash_after = self._rng.randrange(12) if self._rng.random() < 0.2 else -1
        self._simulation.make_snapshot(crash_after)

    def change_limits(self) -> None:
        """Start the controller with other limits, as an operator does."""
        simulation = self._simulation
        simulation.kill_controller()
        simulation.set_limits(random_limits(self._rng))

    def jump_clock(self) -> None:
        MACHINE.wall_offset_ns += self._rng.choice((-1, 1)) * self._rng.randrange(_HOUR_NS)

    def change_files(self) -> None:
        simulation, name = self._simulation, self._rng.choice(NAMES)
        simulation.changed_names.add(name)
        old = simulation.files.pop(name, None)
        if old is not None and self._rng.random() < 0.7:
            simulation.files[name] = Content(
                f"{old.fingerprint}*", old.load_bytes, self._rng.randrange(10, 60)
            )
            simulation.note_content(name)

    def crash_client(self) -> None:
        simulation = self._simulation
        client = self._rng.choice(simulation.clients)
        client.end()
        simulation.clients.remove(client)
        self.workloads.append(Workload(simulation, simulation.start_client()))


_FAULTS: Final[dict[str, Callable[[Nemesis], None]]] = {
    name: method
    for name, method in vars(Nemesis).items()
    if not name.startswith("_") and name != "heal"
}


_THEMES: Final = (
    sorted(_FAULTS),
    [
        *("crash_in_disk_operation", "crash_in_recovery", "lose_power", "fail_syncs"),
        *("fail_writes", "fill_disk", "flip_bit", "make_snapshot", "change_limits"),
    ],
    [
        *(
            "kill_engine",
            "hang_engine",
            "pause_engine",
            "slow_engine",
            "failing_engine",
            "forgetful_engine",
        ),
        *("false_reports", "cut_engine_connection", "partition_engine", "lossy_engine_link"),
        *("kill_controller", "pause_controller", "fill_disk"),
    ],
    [
        *("partition_clients", "lossy_client_links", "crash_client", "malformed_requests"),
        *("kill_controller", "pause_controller", "jump_clock", "lose_power", "make_snapshot"),
    ],
    ["fail_syncs", "lose_power", "make_snapshot"],
    ["false_reports", "cut_engine_connection", "forgetful_engine"],
    ["poison", "kill_controller", "crash_in_disk_operation", "make_snapshot", "fill_disk"],
    ["lossy_engine_link", "slow_engine", "cut_engine_connection", "kill_controller"],
)
"""Faults of one kind meet more often than in a selection from all of them."""


def _wrong_report(model: Any, op: int) -> reports.Report:
    """Return a report of another kind than the operation's."""
    command = type(model.running[op].command).__name__
    return reports.WeightsDropped(op) if command != "DropWeights" else reports.WeightsLoaded(op)
