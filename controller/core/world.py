"""The controller's state: adapters, the engine, operations and pending requests.

Nothing here depends on a clock, on randomness or on the process, so that replaying the same inputs
leads to the same digest anywhere. Only `Controller` and the modules that it calls write it.
"""

import heapq
from itertools import product
from operator import attrgetter
from typing import Final, Literal

import msgspec
import xxhash
from msgspec import Struct, field

from loradock.controller.core.answers import Answer, AnswerWindows
from loradock.controller.core.counters import Counters, fast_assignment
from loradock.controller.core.indexes import TIERS, DigestDict, LruOrder, TierName, TierQueues
from loradock.controller.core.limits import Limits, window_bounds
from loradock.controller.core.rankings import Ranking
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages.ids import (
    CPU_CACHED,
    EVICTED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterId,
    AdapterState,
    OpId,
    RequestId,
    Seq,
)
from loradock.messages.views import Warnings

InferenceKind = Literal["generate", "embed", "classify"]
RequestKind = (
    Literal["load", "stage", "activate", "hold", "deactivate", "evict", "remove", "batch"]
    | InferenceKind
)
DOWNWARD: Final = ("deactivate", "evict", "remove")
"""Kinds of requests whose target is a maximum; the target of every other kind is a minimum."""

INFERENCE: Final = ("generate", "embed", "classify")

TARGET: Final[dict[RequestKind, AdapterState]] = {
    "load": CPU_CACHED,
    "stage": PINNED,
    "activate": GPU_SLOT,
    "hold": GPU_SLOT,
    "deactivate": PINNED,
    "evict": EVICTED,
    "remove": UNREGISTERED,
    "batch": GPU_SLOT,
    "generate": GPU_SLOT,
    "embed": GPU_SLOT,
    "classify": GPU_SLOT,
}
"""The state that a request of each kind wants its adapters in."""

USES: Final = frozenset({*INFERENCE, "activate", "batch"})
"""Kinds of requests that use an adapter in a slot: each one is a hit or a miss.

Those that only prepare it (load, stage, hold) are neither, and no request waits because of them.
"""

DeadlineKind = Literal["operation", "request", "retry", "unknown"]
"""`retry` ends an adapter's backoff, `unknown` is of an operation that is not in the log.

Deadlines of one moment expire in the order of these names."""
Deadline = tuple[int, DeadlineKind, int | str]
"""Time, kind of the thing that expires, and its key."""

RESIDENT: Final = (CPU_CACHED, PINNED, GPU_SLOT)

STATES_HOLDING: Final[dict[TierName, tuple[AdapterState, ...]]] = {
    "host": (CPU_CACHED, PINNED, GPU_SLOT),
    "pinned": (PINNED, GPU_SLOT),
    "device": (GPU_SLOT,),
}
"""The states that use a tier, those that are cheapest to return from first."""


def _tiers_between(without: AdapterState, holding: AdapterState) -> tuple[TierName, ...]:
    return tuple(
        t for t, states in STATES_HOLDING.items() if holding in states and without not in states
    )


_CROSSED: Final = {
    (before, after): (_tiers_between(after, before), _tiers_between(before, after))
    for before, after in product(RESIDENCY_LEVEL, repeat=2)
}
"""The tiers that an adapter leaves, and those that it enters, between two states."""

_MOVES_UP: Final[tuple[tuple[TierName, str, str], ...]] = (
    ("device", "write_ns", "activations"),
    ("pinned", "stage_ns", "stagings"),
    ("host", "load_ns", "loads"),
)
"""The counters of the operation that brings an adapter into a tier, from the slots down."""

NO_PRIORITY: Final = 1 << 62
"""The priority of an adapter that nothing waits for: after every other."""

PREFETCH_PRIORITY: Final = NO_PRIORITY - 1
"""The priority of an adapter that moves ahead of its use: after every adapter with requests."""
DEADLINES_MIN: Final = 1024

_encode: Final = msgspec.msgpack.Encoder().encode


@fast_assignment
class Adapter(Struct, array_like=True, gc=False):
    """One version of an adapter: its state, its goal and its counters.

    The state is what the engine reported, the goal is the state to reach. `host_bytes`,
    `pinned_bytes` and `device_bytes` are charged now, reservations of an operation in flight
    included; `on_host` and `is_staged` state whether it counts there. `kept` is the highest state
    that requests were granted, unless its goal was lowered since: a refused request leaves it
    there. `load_bytes` is its size as read, `blob_bytes` its size as packed. `waiters` maps the
    requests that wait for it, the oldest first, to the `seq` of the input since which each waits:
    with which it arrived, or by which it was suspended (plus its place among what that input
    suspends).
    `announced`: an event reported that it was loaded, so its removal is reported too.
    """

    id: AdapterId
    name: str
    path: str
    state: AdapterState = UNREGISTERED
    goal: AdapterState = UNREGISTERED
    kept: AdapterState = UNREGISTERED
    fingerprint: str = ""
    rank: int = 0
    load_bytes: int = 0
    blob_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    device_bytes: int = 0
    on_host: bool = False
    is_staged: bool = False
    slot: int = NO_SLOT
    generation: int = 0
    held: bool = False
    # Replaced, removed while requests use it, or known to the engine only: no name stands for it.
    # Its requests end, then it is forgotten.
    retired: bool = False
    # The last move failed: the adapter stays until its backoff ends or a request arrives.
    backing_off: bool = False
    # When its last backoff ends or ended.
    retry_ns: int = 0
    # No move succeeded since a failure: a hold alone does not make its priority the first.
    failed: bool = False
    # The version that can replace this version, and the version that this version can replace.
    successor: AdapterId = 0
    predecessor: AdapterId = 0
    leases: int = 0
    op: OpId = 0
    waiters: dict[RequestId, Seq] = {}
    # `World.lru_counter` at its last use, 0 before: victims are chosen in this order.
    lru_stamp: int = 0
    # A wall time.
    last_used_ns: int = 0
    announced: bool = False
    # Its goal is a prefetch's: it moves as far as no use of another adapter is affected.
    prefetched: bool = False
    # The recorded time of its last transition.
    state_since_ns: int = 0
    # When its operation was sent, or when it began to wait for room.
    step_since_ns: int = 0
    counters: Counters = field(default_factory=Counters)

    @property
    def priority(self) -> Seq:
        """Its priority for room, the lowest first: held adapters, then the oldest request."""
        if self.held and not self.failed:
            return 0
        default = PREFETCH_PRIORITY if self.prefetched else NO_PRIORITY
        return next(iter(self.waiters.values()), default)


@fast_assignment
class Operation(Struct, array_like=True, gc=False):
    """One command that the engine has not reported on; `kind` is the command's name.

    It moves `adapter_id`; if that is 0, it serves the request `request_id`. `deadline_ns` is 0
    as long as the request's own deadline bounds it. When it is `overdue`, the engine is lost at the
    next deadline.
    """

    kind: str
    adapter_id: AdapterId
    deadline_ns: int
    request_id: str = ""
    overdue: bool = False


@fast_assignment
class PendingRequest(Struct, array_like=True, gc=False):
    """One accepted request that has not ended.

    `arrived_seq` is the `seq` of the input that it arrived with. While `op` is set, the engine runs
    that operation for it and its adapters are leased, unless the request is one of the adapter's
    waiters: then it is suspended until the adapter is in a slot again. `answered`: its client has
    an answer, but the engine still works. `stopping`: the engine was ordered to end its inference.
    `body` is the hash of the request's body, which a repetition has too. `missed`: its adapter was
    not in a slot when it arrived.
    """

    kind: RequestKind
    adapters: tuple[AdapterId, ...]
    deadline_ns: int
    arrived_seq: Seq
    replace: bool = False
    op: OpId = 0
    answered: bool = False
    stopping: bool = False
    body: int = 0
    arrived_ns: int = 0
    missed: bool = False

    @property
    def target(self) -> AdapterState:
        """The state that its adapters have to be in."""
        return TARGET[self.kind]


@fast_assignment
class AttachedEngine(Struct, array_like=True, gc=False):
    """The attached engine's identity and capacity.

    `reported` is the number of its last report in the log, which is acknowledged to it.
    """

    engine_id: str
    pid: int
    model: str
    max_loras: int
    device_bytes_max: int
    reported: Seq = 0


@fast_assignment
class Tier(Struct, array_like=True, gc=False):
    """One tier's usage and bounds; `count` is adapters on the host, slots on the device."""

    count: int = 0
    size_bytes: int = 0
    count_max: int = 0
    size_bytes_max: int = 0


class World:
    """The state that results from the log's inputs."""

    def __init__(self, limits: Limits) -> None:
        self.seq = 0
        self.time_ns = 0
        # Wall time minus `time_ns` in this epoch: for labels, so it is no part of the digest.
        self.wall_offset_ns = 0
        self.epoch = 0
        self.next_op = 1
        self.next_adapter_id = 1
        # One counter for all slots, so that a generation is never used twice.
        self.next_generation = 1
        self.events_seq = 0
        self.lru_counter = 0
        self.answered = 0
        self.refused = 0
        # The sum of all counters: of adapters, of removed adapters, and of the base model.
        self.totals = Counters()
        self.past_counters = Counters()
        self.base_counters = Counters()
        self.engine: AttachedEngine | None = None
        # Whether the engine sent its inventory since the controller started. No operation is sent
        # before.
        self.engine_ready = False
        # Operations that the engine runs and that are not in the log, with their deadlines.
        self.unknown_operations: dict[OpId, int] = {}
        self.names: dict[str, AdapterId] = {}
        self.adapters: DigestDict[AdapterId, Adapter] = DigestDict()
        # Of those adapters that have any: the others cost nothing.
        self.warnings: DigestDict[AdapterId, Warnings] = DigestDict()
        self.answers = AnswerWindows(window_bounds(limits))
        # The hash of all answers that were ever given, in order: each continues the hash before.
        self.answers_chain = b""
        # Few and changed by every input, so they are hashed whole.
        self.operations: dict[OpId, Operation] = {}
        self.pending_requests: dict[RequestId, PendingRequest] = {}
        self.tiers: dict[TierName, Tier] = {tier: Tier() for tier in TIERS}
        # Of a policy that remembers; empty for one that does not.
        self.rankings: dict[TierName, Ranking] = {}
        # Why `lru` decides in place of the policy, empty if it does not.
        self.policy_failure = ""
        self._derive(limits)

    def _derive(self, limits: Limits) -> None:
        """Create the indexes, which `controller/core/restore.py` computes from the fields above."""
        # A heap of the slots within the limits that no adapter has.
        self.free_slots = list(range(limits.max_loras))
        self.set_bounds(limits)
        # Adapters by state in the order of `lru_stamp`: the first is the first victim.
        self.lru_order: dict[AdapterState, LruOrder] = {state: LruOrder() for state in RESIDENT}
        self.queues = TierQueues()
        # Adapters whose goal is below their state: their room becomes free.
        self.demoting: dict[AdapterId, None] = {}
        # Adapters whose goal is above their state: reconciled again when an engine is back.
        self.promoting: dict[AdapterId, None] = {}
        self.held: dict[AdapterId, None] = {}
        # Pending batches, the oldest first: adapters are moved for that one alone.
        self.batches: dict[RequestId, None] = {}
        self.current_batch: RequestId = ""
        # A heap. Entries of ended things stay until they surface or become too numerous.
        self.deadlines: list[Deadline] = []
        self.deadlines_max = DEADLINES_MIN
        # When `TimerFired` is due, 0 for never.
        self.timer_ns = 0

    def set_bounds(self, limits: Limits) -> None:
        """Bound the tiers by the smaller of the limits and the engine's capacity."""
        host, pinned, device = (self.tiers[tier] for tier in TIERS)
        host.count_max, host.size_bytes_max = limits.max_cpu_loras, limits.host_bytes_max
        pinned.count_max, pinned.size_bytes_max = limits.max_cpu_loras, limits.pinned_bytes_max
        device.count_max = device.size_bytes_max = 0
        if self.engine is not None:
            device.count_max = min(limits.max_loras, self.engine.max_loras)
            device.size_bytes_max = min(limits.device_bytes_max, self.engine.device_bytes_max)

    def rank_by(self, kind: type[Ranking] | None) -> None:
        """Let a ranking of this kind order each tier from now on; None: no ranking."""
        self.policy_failure = ""
        self.rankings = {} if kind is None else {tier: kind() for tier in TIERS}
        if self.rankings:
            resident = [a for a in self.adapters.values() if a.state in RESIDENT]
            for adapter in sorted(resident, key=attrgetter("lru_stamp")):
                self.rank(adapter, UNREGISTERED)

    def rank(self, adapter: Adapter, before: AdapterState) -> None:
        """Record in the rankings that an adapter has left state `before`."""
        left, entered = _CROSSED[before, adapter.state]
        for tier in left:
            self.rankings[tier].leave(adapter.id)
        if entered:
            costs_ns = self.return_costs_ns(adapter)
            for tier in entered:
                self.rankings[tier].enter(adapter.id, adapter.blob_bytes, costs_ns[tier])

    def rank_use(self, adapter: Adapter) -> None:
        """Record a request for an adapter in the rankings."""
        costs_ns = self.return_costs_ns(adapter)
        for tier, ranking in self.rankings.items():
            ranking.use(adapter.id, adapter.blob_bytes, costs_ns[tier])

    def return_costs_ns(self, adapter: Adapter) -> dict[TierName, int]:
        """Return how long the adapter takes to be in a slot again once it has left each tier.

        That is the mean of its operations, or of all adapters' if it had none.
        """
        own, totals = adapter.counters, self.totals
        cost_ns, costs_ns = 1, {}
        for tier, duration, count in _MOVES_UP:
            counters = own if getattr(own, count) else totals
            cost_ns += getattr(counters, duration) // max(1, getattr(counters, count))
            costs_ns[tier] = cost_ns
        return costs_ns

    def current(self, name: str) -> Adapter | None:
        """Return the version that a name stands for now, None for an unknown name."""
        adapter_id = self.names.get(name)
        return None if adapter_id is None else self.adapters[adapter_id]

    def has_suspended(self, adapter: Adapter) -> bool:
        """Return whether a generation of the adapter is suspended."""
        pending = self.pending_requests
        return any(pending[request_id].op for request_id in adapter.waiters)

    def will_resume(self, adapter: Adapter) -> bool:
        """Return whether a suspended generation of the adapter needs a slot: it is not ordered to
        end.
        """
        waiting = [self.pending_requests[request_id] for request_id in adapter.waiters]
        return any(pending.op and not pending.stopping for pending in waiting)

    def awaits_first_slot(self, adapter: Adapter) -> bool:
        """Return whether inference waits for a removed version, whose name was valid when it
        arrived.
        """
        if not adapter.retired:
            return False
        waiting = [self.pending_requests[request_id] for request_id in adapter.waiters]
        return any(pending.kind in INFERENCE and not pending.op for pending in waiting)

    def is_wanted_down(self, adapter: Adapter) -> bool:
        """Return whether a downward request waits for the adapter; upward requests are served after
        it.
        """
        pending = self.pending_requests
        return any(pending[request_id].kind in DOWNWARD for request_id in adapter.waiters)

    def add_answer(self, answer: Answer) -> None:
        """Keep the answer of a request, and continue the chain of answers with it."""
        self.answers.add(answer)
        self.answers_chain = xxhash.xxh3_128_digest(self.answers_chain + _encode(answer))

    def add_deadline(self, at_ns: int, kind: DeadlineKind, key: int | str) -> None:
        """Add a deadline; ended deadlines are dropped when there are too many."""
        heapq.heappush(self.deadlines, (at_ns, kind, key))
        if len(self.deadlines) > self.deadlines_max:
            # Nearly all are of requests that have ended: the pending ones are fewer.
            others = [entry for entry in self.deadlines if entry[1] != "request"]
            self.deadlines = [*self.request_deadlines(), *filter(self.is_live, others)]
            heapq.heapify(self.deadlines)
            self.deadlines_max = 2 * len(self.deadlines) + DEADLINES_MIN

    def request_deadlines(self) -> list[Deadline]:
        """Return the live deadlines of requests, in no particular order."""
        waiting = [item for item in self.pending_requests.items() if not item[1].answered]
        return [(pending.deadline_ns, "request", key) for key, pending in waiting]

    def is_live(self, entry: Deadline) -> bool:
        """Return whether the thing that the deadline is for still exists, and still has this
        deadline.
        """
        at_ns, kind, key = entry
        if kind == "request":
            pending = self.pending_requests.get(key)  # type: ignore[arg-type]
            return pending is not None and pending.deadline_ns == at_ns and not pending.answered
        if kind == "operation":
            operation = self.operations.get(key)  # type: ignore[arg-type]
            return operation is not None and operation.deadline_ns == at_ns
        if kind == "unknown":
            return self.unknown_operations.get(key) == at_ns  # type: ignore[arg-type]
        adapter = self.adapters.get(key)  # type: ignore[arg-type]
        return adapter is not None and adapter.backing_off and adapter.retry_ns == at_ns

    def digest(self) -> str:
        """Return a hash of all state: 32 hex characters, equal for equal histories.

        Its cost depends on what changed and what is in flight, not on the number of adapters.
        """
        return self._digest(
            [self.adapters.digest(), self.warnings.digest()],
            [(tier, ranking.digest()) for tier, ranking in self.rankings.items()],
        )

    def digest_from_scratch(self) -> str:
        """Return the same hash without using remembered entry hashes."""
        return self._digest(
            [self.adapters.digest_from_scratch(), self.warnings.digest_from_scratch()],
            [(tier, ranking.digest_from_scratch()) for tier, ranking in self.rankings.items()],
        )

    def _digest(self, sums: list[int], rankings: list[tuple[TierName, object]]) -> str:
        state = (
            [str(value) for value in sums],
            (self.seq, self.time_ns, self.epoch, self.events_seq, self.lru_counter),
            (self.next_op, self.next_adapter_id, self.next_generation),
            (self.answered, self.refused, len(self.answers), self.answers_chain),
            (self.totals, self.past_counters, self.base_counters),
            (self.engine, self.engine_ready, list(self.unknown_operations.items())),
            [self.tiers[tier] for tier in TIERS],
            [self.queues.by_tier[tier] for tier in TIERS],
            (list(self.operations.items()), list(self.pending_requests.items())),
            (rankings, self.policy_failure),
        )
        return xxhash.xxh3_128_hexdigest(_encode(state))
