"""The core under a traffic and other settings, on a simulated engine.

`Controller` decides as it does for a server; the engine's operations take what `Service` draws for
them, and running generations share the steps of `Service.step`. Arrivals are open loop: a client
sends its next request when it did, however long this one takes. One seed is one run.
"""

import heapq
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct, field

from loradock.controller.core.actions import (
    Action,
    PublishEvent,
    RestartEngine,
    SendCommand,
)
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.limits import Limits, check_limits
from loradock.controller.core.rankings import Accepts, Ranking
from loradock.controller.core.use_history import UseHistory
from loradock.controller.log.replay import without_garbage_collection
from loradock.lab.outcome import Meter, Outcome
from loradock.lab.prefetches import PrefetchMeter
from loradock.lab.traffic import Arrival, Facts, Traffic, Work, adapters_of
from loradock.messages import commands, records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.events import Published
from loradock.messages.ids import BASE_MODEL, AdapterId, OpId
from loradock.messages.views import FinishReason

BELADY: Final = "belady"
"""The policy that knows all arrivals: whose next use is the furthest leaves first."""

_DONE: Final[dict[type, type]] = {
    commands.StageWeights: reports.WeightsStaged,
    commands.UnstageWeights: reports.WeightsUnstaged,
    commands.WriteSlot: reports.SlotWritten,
    commands.ResetSlot: reports.SlotReset,
    commands.DropWeights: reports.WeightsDropped,
}


PrefetchChange = Literal["as-logged", "none", "history"]


class Changes(Struct, frozen=True, kw_only=True):
    """What a run has other than the traffic's own.

    `limits` has the fields of `Limits`. `holds` are the adapters that are held from the start, in
    place of the logged holds. `storage` is how many times as fast files are read, `arrivals` how
    many times as fast requests arrive. `prefetch` is "as-logged", "none" (logged prefetches are
    left out) or "history" (those that `UseHistory` finds are added).
    """

    policy: str = ""
    limits: dict[str, int] = {}
    holds: tuple[str, ...] | None = None
    prefetch: PrefetchChange = "as-logged"
    storage: float = 1.0
    arrivals: float = 1.0

    def settings(self, traffic: Traffic) -> tuple[Limits, str]:
        """Return the limits and the policy of the run."""
        limits = msgspec.structs.replace(traffic.limits, **self.limits)
        return limits, self.policy or traffic.policy

    def changes_nothing(self, traffic: Traffic) -> bool:
        """Return whether the run is the traffic's own."""
        own = Changes(policy=self.policy, limits=self.limits)
        return self == own and self.settings(traffic) == (traffic.limits, traffic.policy)


class Run(Struct, frozen=True):
    """The outcome of a run, with its events for a drawing."""

    outcome: Outcome
    events: list[Published]


def what_if(traffic: Traffic, changes: Changes, seed: int = 0) -> Run:
    """Return what changes would have done; without any, it is the log's own run, to the digest."""
    if traffic.logged is not None and changes.changes_nothing(traffic):
        return Run(traffic.logged, traffic.events)
    return simulate(traffic, changes, seed)


def simulate(traffic: Traffic, changes: Changes | None = None, seed: int = 0) -> Run:
    """Return a simulated run, also if nothing is changed: its error against the log is the fit's.

    Raises `LimitsError` for limits that contradict one another, `KeyError` for an unknown policy.
    """
    with without_garbage_collection():
        return _Simulation(traffic, changes or Changes(), seed).run()


class _Generation(Struct):
    """A generation on the engine; `left` tokens are to be made from step `joined` on.

    `joined` is -1 while it waits for its prompt or for its slot.
    """

    op: OpId
    request_id: str
    adapter_id: AdapterId
    work: Work
    left: float
    started_ns: int
    first_token_ns: int = 0
    joined: float = -1.0
    is_ready: bool = False
    suspended: bool = False


class _Adapter(Struct):
    """An adapter that the engine knows, its generations, and the order that ends its turn."""

    facts: Facts
    generations: dict[OpId, _Generation] = field(default_factory=dict)
    preemption: commands.PreemptSlot | None = None


class _Engine:
    """A simulated engine: it accepts commands, and has reports at later moments.

    Steps are counted instead of executed: every running generation has one token per step, so its
    end is a known count, and the count advances by the time of a step of the present batch.
    """

    def __init__(self, traffic: Traffic, meter: Meter, rng: random.Random, storage: float) -> None:
        self._traffic, self._meter, self._rng, self._storage = traffic, meter, rng, storage
        self._service = traffic.service
        base = _Adapter(Facts())
        self._adapters: dict[AdapterId, _Adapter] = {BASE_MODEL: base}
        self._slots: dict[int, AdapterId] = {}
        self._generations: dict[OpId, _Generation] = {}
        # Reports by time, and ends of generations and of turns by the count of steps.
        self._due: list[tuple[int, int, Any, AdapterId]] = []
        self._ends: list[tuple[float, OpId, AdapterId]] = []
        self._number = 0
        self._rows: dict[AdapterId, int] = {}
        self._steps, self._step_ns = 0.0, 1.0
        self._now_ns = 0

    def next_ns(self) -> int | None:
        """Return when something happens on the engine next, None if nothing is going on."""
        found = self._due[0][0] if self._due else None
        if self._rows and self._ends:
            left = max(0.0, self._ends[0][0] - self._steps)
            end_ns = self._now_ns + int(left * self._step_ns) + 1
            found = end_ns if found is None else min(found, end_ns)
        return found

    def advance(self, time_ns: int) -> list[Any]:
        """Advance to a moment that is at most `next_ns`; return the reports of it."""
        if self._rows:
            self._steps += (time_ns - self._now_ns) / self._step_ns
        self._now_ns = time_ns
        found = []
        while self._ends and self._ends[0][0] <= self._steps:
            _, op, adapter_id = heapq.heappop(self._ends)
            if op:
                self._end_if_complete(op)
            else:
                self._end_turn_if_over(self._adapters[adapter_id])
        while self._due and self._due[0][0] <= time_ns:
            _, _, done, adapter_id = heapq.heappop(self._due)
            if isinstance(done, _Generation):
                done.is_ready = True
                self._join(done)
                continue
            if isinstance(done, reports.SlotWritten):
                for generation in self._adapters[adapter_id].generations.values():
                    self._resume(generation)
            found.append(done)
        return found

    def submit(self, command: Any) -> None:
        """Begin a command; those that ask for output or an inventory have no effect."""
        begin = _BEGIN.get(type(command))
        if begin is not None:
            begin(self, command)

    def _pool(self, command: commands.StartPooling) -> None:
        self._meter.start(command.request_id, self._now_ns)
        tokens = self._work(command.request_id).prompt_tokens
        taken_ns = self._service.pooling.draw(tokens, self._rng)
        self._meter.end(command.request_id, self._now_ns + taken_ns, 0)
        self._later(taken_ns, reports.PoolingEnded(command.op, 1, tokens))

    def _stop(self, command: commands.StopGeneration) -> None:
        if command.target in self._generations:
            self._end(self._generations[command.target], "cancelled")

    def _preempt(self, command: commands.PreemptSlot) -> None:
        adapter = self._adapters[self._slots[command.slot]]
        adapter.preemption = command
        self._end_turn_if_over(adapter)

    def _write(self, command: commands.WriteSlot) -> None:
        self._slots[command.slot] = command.adapter_id
        self._operate(command, command.adapter_id)

    def _reset(self, command: commands.ResetSlot) -> None:
        self._operate(command, self._slots[command.slot])

    def _move(
        self, command: commands.StageWeights | commands.UnstageWeights | commands.DropWeights
    ) -> None:
        self._operate(command, command.adapter_id)

    def _read(self, command: commands.CheckAdapter | commands.LoadWeights) -> None:
        facts = self._traffic.files.get(command.path, Facts(code=ErrorCode.NOT_FOUND))
        if command.adapter_id not in self._adapters:
            self._adapters[command.adapter_id] = _Adapter(facts)
        report: Any = reports.WeightsLoaded(command.op)
        if facts.code is not None:
            report = reports.OperationFailed(command.op, facts.code, "as the log has it")
        elif isinstance(command, commands.CheckAdapter):
            sizes = (facts.rank, facts.host_bytes, facts.blob_bytes)
            report = reports.AdapterChecked(command.op, facts.fingerprint, *sizes)
        else:
            self._meter.load_bytes += facts.host_bytes
        name = type(command).__name__
        taken_ns = self._service.draw(name, facts.host_bytes, self._rng, self._storage)
        self._later(taken_ns, report)

    def _operate(self, command: Any, adapter_id: AdapterId) -> None:
        """Report on an operation after its time."""
        size_bytes = self._adapters[adapter_id].facts.blob_bytes
        taken_ns = self._service.draw(type(command).__name__, size_bytes, self._rng)
        self._later(taken_ns, _DONE[type(command)](command.op), adapter_id)

    def _later(self, taken_ns: int, done: Any, adapter_id: AdapterId = BASE_MODEL) -> None:
        self._number += 1
        heapq.heappush(self._due, (self._now_ns + taken_ns, self._number, done, adapter_id))

    def _work(self, request_id: str) -> Work:
        return self._traffic.works.get(request_id, self._traffic.usual_work)

    def _start(self, command: commands.StartGeneration) -> None:
        work = self._work(command.request_id)
        left, now_ns = float(work.output_tokens), self._now_ns
        generation = _Generation(
            command.op, command.request_id, command.adapter_id, work, left, now_ns
        )
        self._generations[command.op] = generation
        self._adapters[command.adapter_id].generations[command.op] = generation
        self._meter.start(command.request_id, self._now_ns)
        self._later(self._service.step.prompt_ns(work.prompt_tokens), generation)

    def _join(self, generation: _Generation) -> None:
        """Let a generation take part in steps, unless it has ended or has no slot."""
        if generation.suspended or generation.op not in self._generations:
            return
        adapter_id = generation.adapter_id
        generation.joined = self._steps
        self._rows[adapter_id] = self._rows.get(adapter_id, 0) + 1
        self._set_step()
        end = self._steps + generation.left
        heapq.heappush(self._ends, (end, generation.op, adapter_id))
        if generation.left and not generation.first_token_ns:
            first_ns = self._now_ns + int(self._step_ns)
            generation.first_token_ns = first_ns - generation.started_ns
            self._meter.begin_tokens(generation.request_id, first_ns)
        self._end_turn_if_over(self._adapters[adapter_id])

    def _part(self, generation: _Generation) -> None:
        """Take a generation out of the batch."""
        if generation.joined < 0:
            return
        generation.left = max(0.0, generation.left - (self._steps - generation.joined))
        generation.joined = -1.0
        adapter_id = generation.adapter_id
        self._rows[adapter_id] -= 1
        if not self._rows[adapter_id]:
            del self._rows[adapter_id]
        self._set_step()

    def _set_step(self) -> None:
        ranks = sum([self._adapters[adapter_id].facts.rank for adapter_id in self._rows])
        adapters = len(self._rows) - (BASE_MODEL in self._rows)
        self._step_ns = self._service.step.step_ns(sum(self._rows.values()), adapters, ranks)

    def _resume(self, generation: _Generation) -> None:
        if generation.suspended:
            generation.suspended = False
            if generation.is_ready:
                self._join(generation)

    def _end_if_complete(self, op: OpId) -> None:
        generation = self._generations.get(op)
        if generation is None or generation.joined < 0:
            return
        if self._steps - generation.joined >= generation.left:
            self._end(generation, "stop")

    def _end(self, generation: _Generation, reason: FinishReason) -> None:
        self._part(generation)
        work = generation.work
        made = work.output_tokens - round(generation.left)
        adapter = self._adapters[generation.adapter_id]
        del self._generations[generation.op], adapter.generations[generation.op]
        self._meter.end(generation.request_id, self._now_ns, made)
        first_ns = generation.first_token_ns if made else 0
        ended = reports.GenerationEnded(
            generation.op, reason, work.prompt_tokens, made, first_token_ns=first_ns
        )
        self._later(0, ended)
        self._end_turn_if_over(adapter)

    def _end_turn_if_over(self, adapter: _Adapter) -> None:
        """Suspend the generations of a turn that is over; otherwise wait for the step of its end.

        The oldest must have had a token, and one of them the tokens of the turn.
        """
        order = adapter.preemption
        if order is None:
            return
        running = [one for one in adapter.generations.values() if not one.suspended]
        if running:
            joined = [one.joined for one in running if one.joined >= 0]
            if running[0].joined < 0:
                # It joins once its prompt is computed.
                return
            end = max(running[0].joined + 1, min(joined) + order.tokens)
            if end > self._steps:
                heapq.heappush(self._ends, (end, 0, running[0].adapter_id))
                return
        for generation in running:
            self._part(generation)
            generation.suspended = True
        adapter.preemption = None
        taken_ns = self._service.draw("ResetSlot", adapter.facts.blob_bytes, self._rng)
        self._later(taken_ns, reports.SlotReset(order.op))


_BEGIN: Final[dict[type, Callable[[_Engine, Any], None]]] = {
    commands.CheckAdapter: _Engine._read,
    commands.LoadWeights: _Engine._read,
    commands.StageWeights: _Engine._move,
    commands.UnstageWeights: _Engine._move,
    commands.DropWeights: _Engine._move,
    commands.WriteSlot: _Engine._write,
    commands.ResetSlot: _Engine._reset,
    commands.PreemptSlot: _Engine._preempt,
    commands.StartGeneration: _Engine._start,
    commands.StartPooling: _Engine._pool,
    commands.StopGeneration: _Engine._stop,
}


class _Simulation:
    """One run: the core, the engine, and the arrivals that are left."""

    def __init__(self, traffic: Traffic, changes: Changes, seed: int) -> None:
        limits, policy = changes.settings(traffic)
        self._arrivals = _changed_arrivals(traffic, changes)
        self._controller = Controller(
            check_limits(limits), policy, policies={**POLICIES, BELADY: self._belady()}
        )
        self._traffic, self._changes = traffic, changes
        self._meter = Meter()
        self._prefetches = PrefetchMeter(self._controller.world)
        self._history = UseHistory() if changes.prefetch == "history" else None
        self._prefetched = 0
        self._rng = random.Random(seed)  # noqa: S311 - a simulation
        self._events: list[Published] = []
        self._engines = 0
        self._now_ns = self._arrivals[0].time_ns if self._arrivals else 0
        self._engine = self._new_engine()

    def run(self) -> Run:
        """Run until every request has ended."""
        self._handle(records.ControllerStarted(1))
        self._attach()
        for arrival in self._arrivals:
            self._run_until(arrival.time_ns)
            message = arrival.message
            if isinstance(message, records.InferenceRequested):
                self._meter.arrive(message.request_id, message.adapter or "", arrival.time_ns)
                if self._history is not None and message.adapter:
                    self._history.use(message.adapter, arrival.time_ns)
            self._handle(message, arrival.body)
        # Nothing is used any more.
        self._history = None
        world = self._controller.world
        while world.pending_requests and self._run_next(None):
            pass
        self._prefetches.end()
        return Run(self._outcome(), self._events)

    def _outcome(self) -> Outcome:
        return msgspec.structs.replace(
            self._meter.outcome(self._controller),
            prefetches_useful=self._prefetches.useful,
            prefetches_useless=self._prefetches.useless,
            prefetches_harmful=self._prefetches.harmful,
        )

    def _run_until(self, time_ns: int) -> None:
        while self._run_next(time_ns):
            pass
        self._now_ns = max(self._now_ns, time_ns)
        self._feed(self._engine.advance(self._now_ns))

    def _run_next(self, limit_ns: int | None) -> bool:
        """Let the next thing happen if it does before a limit; return whether it did."""
        engine_ns, timer_ns = self._engine.next_ns(), self._controller.world.timer_ns
        due_ns = None if self._history is None else self._history.next_ns()
        times = [one for one in (engine_ns, timer_ns or None, due_ns) if one is not None]
        if not times or (limit_ns is not None and min(times) >= limit_ns):
            return False
        self._now_ns = max(self._now_ns, min(times))
        self._feed(self._engine.advance(self._now_ns))
        if 0 < self._controller.world.timer_ns <= self._now_ns:
            self._handle(records.TimerFired())
        for name in () if self._history is None else self._history.take_due(self._now_ns):
            self._prefetched += 1
            self._handle(requests.PrefetchAdapter(f"what-if-prefetch-{self._prefetched}", name))
        return True

    def _feed(self, found: list[Any]) -> None:
        for report in found:
            self._handle(report)

    def _attach(self) -> None:
        """Attach an engine without adapters."""
        self._engines += 1
        self._engine = self._new_engine()
        limits = self._controller.limits
        inventory = msgspec.structs.replace(
            self._traffic.inventory,
            engine_id=f"simulated-{self._engines}",
            max_loras=limits.max_loras,
            device_bytes_max=limits.device_bytes_max,
            last_op=0,
            running=(),
            suspended=(),
            adapters=(),
        )
        self._handle(inventory)

    def _new_engine(self) -> _Engine:
        engine = _Engine(self._traffic, self._meter, self._rng, self._changes.storage)
        engine.advance(self._now_ns)
        return engine

    def _handle(self, message: records.Input, body: int = 0) -> None:
        self._prefetches.before(message)
        actions: list[Action] = self._controller.handle(message, self._now_ns, body)
        self._prefetches.after(message)
        for action in actions:
            if isinstance(action, SendCommand):
                self._engine.submit(action.message)
            elif isinstance(action, PublishEvent):
                self._events.append(action.message)
            elif isinstance(action, RestartEngine):
                self._attach()
                return

    def _belady(self) -> type[Ranking]:
        """Return the ranking that knows the arrivals."""
        uses: defaultdict[str, list[int]] = defaultdict(list)
        for arrival in self._arrivals:
            for name in adapters_of(arrival.message):
                uses[name].append(arrival.time_ns)

        def next_use_ns(adapter_id: AdapterId) -> int:
            times = uses[self._controller.world.adapters[adapter_id].name]
            place = bisect_right(times, self._now_ns)
            return times[place] if place < len(times) else 1 << 62

        class Belady(Ranking):
            """Whose next use is the furthest leaves first."""

            def peek(self, accepts: Accepts) -> AdapterId | None:
                return max(filter(accepts, self), key=next_use_ns, default=None)

        return Belady


def _changed_arrivals(traffic: Traffic, changes: Changes) -> list[Arrival]:
    """Return the arrivals with other times, holds and prefetches; raises `ValueError`."""
    if not traffic.arrivals:
        return []
    first_ns = traffic.arrivals[0].time_ns
    found: list[Arrival] = []
    for arrival in traffic.arrivals:
        message = arrival.message
        is_hold = isinstance(message, requests.HoldAdapter | requests.ReleaseAdapter)
        is_prefetch = isinstance(message, requests.PrefetchAdapter)
        if (is_hold and changes.holds is not None) or (is_prefetch and changes.prefetch == "none"):
            continue
        time_ns = first_ns + int((arrival.time_ns - first_ns) / changes.arrivals)
        found.append(Arrival(time_ns, message, arrival.body))
    return [*_holds(traffic, changes, first_ns), *found]


def _holds(traffic: Traffic, changes: Changes, time_ns: int) -> list[Arrival]:
    paths: dict[str, str] = {}
    for arrival in traffic.arrivals:
        if path := getattr(arrival.message, "path", ""):
            paths.setdefault(adapters_of(arrival.message)[0], path)
    unknown = [name for name in changes.holds or () if name not in paths]
    if unknown:
        raise ValueError(f"adapter {unknown[0]!r} is not in the log")
    return [
        Arrival(time_ns, requests.HoldAdapter(f"what-if-hold-{number}", name, paths[name]))
        for number, name in enumerate(changes.holds or ())
    ]
