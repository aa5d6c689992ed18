"""One schedule: a phase with faults, a phase without in which everything must end, and the checks.

`run_schedule` raises `ScheduleFailed` with the seed at the first violated promise.
"""

import random
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from loradock.controller.core.actions import PublishEvent
from loradock.controller.core.invariants import check
from loradock.controller.log.events import EventReader
from loradock.controller.log.replay import replay
from loradock.messages import requests
from tests.support.campaign.client_process import ClientProcess, is_success
from tests.support.campaign.controller_process import LOG_DIRECTORY
from tests.support.campaign.machine import MACHINE
from tests.support.campaign.nemesis import DELAY_NS_MAX, Nemesis
from tests.support.campaign.scheduler import Scheduler
from tests.support.campaign.simulation import NAMES, Simulation

STEPS: Final = 200
_SETTLE_STEPS_MAX: Final = 20_000
"""Bound on the actions of the phase without faults."""


class ScheduleFailed(AssertionError):  # noqa: N818 - the name of an event
    """A schedule violated a promise; `check` is the check that found it."""

    def __init__(self, seed: int, steps: int, check: str, error: BaseException) -> None:
        super().__init__(f"SEED={seed} STEPS={steps}: {check}: {type(error).__name__}: {error}")
        self.seed = seed
        self.check = check


class Outcome(NamedTuple):
    """The result of a schedule without a violation."""

    trace: str
    requests: int
    answers: int
    starts: int
    events: int


def run_schedule(seed: int, steps: int = STEPS, log: list[str] | None = None) -> Outcome:
    """Run the schedule of a seed; call it while the machine is simulated.

    `log` receives a readable trace.
    """
    run = _Run(seed, log)
    for phase in (run.disturb, run.settle, run.probe, run.compare):
        try:
            phase(steps)
        except Exception as error:
            raise ScheduleFailed(seed, steps, _check_of(error, phase.__name__), error) from error
    return run.outcome()


def _check_of(error: Exception, phase: str) -> str:
    """Return the function that found the violation, and the phase."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name} ({phase})"


class _Run:
    """The phases of one schedule."""

    def __init__(self, seed: int, log: list[str] | None) -> None:
        self._simulation = Simulation(seed)
        self._scheduler: Scheduler = self._simulation.scheduler
        self._scheduler.log = log
        self._rng: random.Random = self._simulation.rng

    def outcome(self) -> Outcome:
        history = self._simulation.history
        return Outcome(
            self._scheduler.trace,
            len(history.requests),
            len(history.answers),
            self._simulation.controller.starts,
            len(history.published),
        )

    def disturb(self, steps: int) -> None:
        """Let clients send requests, under faults."""
        self._simulation.begin(clients=self._rng.randint(1, 3))
        self._nemesis = Nemesis(self._simulation)
        for _ in range(steps):
            self._scheduler.step()

    def settle(self, _steps: int) -> None:
        """End all faults, and wait until every request is answered and nothing moves."""
        self._nemesis.heal()
        # Frames and operations that were delayed before arrive in this time.
        quiet_ns = MACHINE.now_ns + DELAY_NS_MAX

        def is_settled() -> bool:
            return MACHINE.now_ns > quiet_ns and self._is_settled()

        self._run_until(is_settled, "not every request was answered")

    def probe(self, _steps: int) -> None:
        """Let a client use every adapter: without faults, each request must succeed."""
        simulation = self._simulation
        if self._rng.random() < 0.5:
            simulation.make_snapshot()
            simulation.kill_controller()
            self._run_until(self._is_settled, "nothing is settled after a restart")
        client = simulation.clients[0]
        for name in NAMES:
            self._call(client, requests.ReleaseAdapter("", name), may_fail=True)
        for name in self._rng.sample(NAMES, len(NAMES)):
            self._prefetch(client, name)
        for name in NAMES:
            simulation.changed_names.add(name)
            self._call(client, requests.LoadAdapter("", name), may_fail=self._is_too_large(name))
        name = self._rng.choice(NAMES)
        may_fail = self._is_too_large(name)
        self._call(client, requests.Generate("", name, "a last prompt"), may_fail=may_fail)
        self._call(client, requests.Generate("", None, "a last prompt"))
        self._run_until(self._is_settled, "the probes did not end")

    def _prefetch(self, client: ClientProcess, name: str) -> None:
        """Let a client prefetch an adapter: no other one may leave its slot for it."""
        before = self._in_slots()
        self._call(client, requests.PrefetchAdapter("", name), may_fail=True)
        self._run_until(self._is_settled, f"the prefetch of {name} did not end")
        moved = before - self._in_slots()
        assert not moved, f"{moved} left their slots for the prefetch of {name}"

    def _in_slots(self) -> set[int]:
        """Return the adapters in slots.

        Their slots and generations change if an engine's end is noticed now, by its silence.
        """
        adapters = self._simulation.controller.world.adapters.values()
        return {adapter.id for adapter in adapters if adapter.state == "gpu-slot"}

    def _is_too_large(self, name: str) -> bool:
        limits = self._simulation.limits
        # A file may have changed since the adapter was checked first.
        if name in self._simulation.changed_names:
            return True
        content = self._simulation.files[name]
        most = min(limits.pinned_bytes_max, limits.device_bytes_max, limits.host_bytes_max)
        return max(content.load_bytes, content.blob_bytes) > most

    def _call(
        self, client: ClientProcess, request: requests.Request, *, may_fail: bool = False
    ) -> None:
        call = client.begin(request)
        self._run_until(lambda: call.settled, f"{request} was not answered")
        assert may_fail or is_success(call), f"{call.request} was refused: {call.outcome!r}"

    def _run_until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(_SETTLE_STEPS_MAX):
            if condition():
                return
            if not self._scheduler.step():
                break
        raise AssertionError(f"{what}; pending: {self._pending()}")

    def _pending(self) -> list[object]:
        calls = [call for client in self._simulation.clients for call in client.calls]
        return [call.request for call in calls]

    def _is_settled(self) -> bool:
        simulation = self._simulation
        reader = simulation.subscriber
        controller = simulation.controller
        if any(client.calls for client in simulation.clients) or not controller.is_running:
            return False
        world = controller.world
        is_idle = world.engine_ready and not world.operations and not world.pending_requests
        is_idle = is_idle and not world.unknown_operations and not world.demoting
        assert reader is not None
        return is_idle and not reader.client.calls and reader.next_seq == world.events_seq + 1

    def compare(self, _steps: int) -> None:
        """Compare clients, subscribers, the engine, and a replay with the controller."""
        simulation = self._simulation
        world, history = simulation.controller.world, simulation.history
        simulation.make_snapshot()
        check(world, simulation.limits)
        history.check_recovered(world)
        history.check_uses(world, simulation.changed_names)
        assert simulation.subscriber is not None
        if not simulation.drops_old_files:
            history.check_events(simulation.subscriber.events)
        self._compare_engine()
        self._compare_replay()

    def _compare_engine(self) -> None:
        """Check that the controller's records equal the engine's adapters."""
        engine, world = self._simulation.engine, self._simulation.controller.world
        assert engine is not None
        held = {a: (h.state, h.slot, h.generation) for a, h in engine.engine.model.adapters.items()}
        known = {}
        for adapter in world.adapters.values():
            if adapter.state in ("cpu-cached", "pinned", "gpu-slot"):
                is_in_slot = adapter.state == "gpu-slot"
                place = (adapter.slot, adapter.generation) if is_in_slot else (-1, 0)
                known[adapter.id] = (adapter.state, *place)
        assert known == held, f"the controller has {known}, the engine {held}"

    def _compare_replay(self) -> None:
        """Check that the log and its snapshots lead to the same state and the same events."""
        simulation = self._simulation
        disk, world = simulation.disk, simulation.controller.world
        assert world.digest() == world.digest_from_scratch(), "a changed entry was not hashed again"
        for from_start in (False, True) if not simulation.drops_old_files else (False,):
            published: list[object] = []

            def sink(actions: list[Any], published: list[object] = published) -> None:
                published += [a.message for a in actions if isinstance(a, PublishEvent)]

            result = replay(LOG_DIRECTORY, sink=sink, from_start=from_start, storage=disk)
            assert result.divergence is None, f"the replay diverges: {result.divergence}"
            assert result.digest == world.digest(), "a replay leads to another digest"
            self._compare_events(published)

    def _compare_events(self, replayed: list[Any]) -> None:
        """Check that events have the same numbers and content wherever they are read."""
        simulation = self._simulation
        assert simulation.subscriber is not None
        received = simulation.subscriber.events
        by_number = {event.seq: event for event in replayed}
        stored = EventReader(LOG_DIRECTORY, simulation.disk).read(1, len(replayed))
        for event in (*received, *simulation.history.published.values(), *stored):
            expected = by_number.get(event.seq, event)
            assert event == expected, f"{event} was received, a replay has {expected}"
        if replayed and replayed[0].seq == 1:
            assert received == replayed, "the subscriber has other events than a replay"
            assert list(stored) == replayed, "the files lack events"
