"""All that the controller knows: adapters, slots, the engine, operations, requests.

What it is: state with its accounts, indexes and digest. What it is not: decisions (`core` and the
modules it calls are the only writers). One rule: nothing here depends on a clock, on chance or on
the process, so that folding the same inputs gives the same digest anywhere.
"""

import heapq
from collections import OrderedDict, deque
from typing import Final, Literal

import msgspec
import xxhash
from msgspec import Struct

from controller.core.digest_dict import Ledger
from controller.core.limits import Limits
from controller.core.tier_queues import TIERS, Queues, TierName
from messages.commands import Operation as OperationCommand
from messages.ids import (
    CPU_CACHED,
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
from messages.requests import Reply

InferenceKind = Literal["generate", "embed", "classify"]
RequestKind = (
    Literal["load", "stage", "activate", "hold", "deactivate", "evict", "remove", "batch"]
    | InferenceKind
)
DeadlineKind = Literal["operation", "request", "rest"]
Deadline = tuple[int, DeadlineKind, int | str]
"""When to look, at what sort of thing, and its key."""

RESIDENT: Final = (CPU_CACHED, PINNED, GPU_SLOT)
NO_CLAIM: Final = 1 << 62
DEADLINES_MIN: Final = 1024


class Adapter(Struct, array_like=True, gc=False):
    """One version of an adapter: its state (a fact), its goal (a wish) and its books.

    `host_bytes`, `pinned_bytes` and `device_bytes` are what it is charged for now, reservations of
    an operation in flight included; `load_bytes` and `blob_bytes` what it takes as it is read and
    packed. `waiters` are the requests that it owes a fact, the oldest first, and by which input
    each one came.
    """

    id: AdapterId
    name: str
    path: str
    state: AdapterState = UNREGISTERED
    goal: AdapterState = UNREGISTERED
    fingerprint: str = ""
    rank: int = 0
    load_bytes: int = 0
    blob_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    device_bytes: int = 0
    on_host: bool = False
    slot: int = NO_SLOT
    generation: int = 0
    held: bool = False
    # An old version, or a stranger that an engine brought: it ends its requests and goes.
    retired: bool = False
    # The last attempt to move it failed: it is left alone until its rest is over or somebody
    # asks, and a hold alone does not put it first again.
    resting: bool = False
    failed: bool = False
    # The version that may take over this name, and the version that this one may take over from.
    successor: AdapterId = 0
    predecessor: AdapterId = 0
    leases: int = 0
    op: OpId = 0
    waiters: dict[RequestId, Seq] = {}
    # The world's counter at its last use or move: the order in which victims are looked for.
    touched: int = 0
    last_used_ns: int = 0
    uses: int = 0
    loads: int = 0
    hits: int = 0
    evictions: int = 0
    failures: int = 0

    @property
    def claim(self) -> Seq:
        """Its place among those who want room: what is held comes first, then the oldest."""
        if self.held and not self.failed:
            return 0
        return next(iter(self.waiters.values()), NO_CLAIM)


class Slot(Struct, array_like=True, gc=False):
    """One device slot; `adapter_id` 0 means free, else reserved or occupied."""

    generation: int = 0
    adapter_id: AdapterId = 0


class Operation(Struct, array_like=True, gc=False):
    """One command that the engine has not reported on.

    It moves `adapter_id`, or (where that is 0) serves the request `request_id`.
    """

    command: OperationCommand
    adapter_id: AdapterId
    deadline_ns: int
    request_id: RequestId = ""
    overdue: bool = False


class Waiting(Struct, array_like=True, gc=False):
    """One accepted request without its answer.

    `since` is the input that brought it. With `op`, the engine works for it and its adapters are
    leased. `told` marks one whose client was answered already, while the engine still works.
    `stopping` marks inference that the engine was asked to end.
    """

    kind: RequestKind
    adapters: tuple[AdapterId, ...]
    target: AdapterState
    deadline_ns: int
    since: Seq
    replace: bool = False
    op: OpId = 0
    told: bool = False
    stopping: bool = False


class Engine(Struct, array_like=True, gc=False):
    """The attached engine's life and what it can hold."""

    engine_id: str
    pid: int
    model: str
    slots_max: int
    device_bytes_max: int


class Tier(Struct, array_like=True, gc=False):
    """One tier's use and bounds: `count` is adapters on the host or slots on the device."""

    count: int = 0
    size_bytes: int = 0
    count_max: int = 0
    size_bytes_max: int = 0


class World:
    """Everything that the log's inputs add up to."""

    def __init__(self, limits: Limits) -> None:
        self.seq = 0
        self.time_ns = 0
        self.epoch = 0
        self.next_op = 1
        self.next_adapter_id = 1
        # One counter for all slots: a generation is never given twice, whatever becomes of a slot.
        self.next_generation = 1
        self.events_seq = 0
        self.clock = 0
        self.answered = 0
        self.refused = 0
        self.engine: Engine | None = None
        # Whether the engine's inventory was taken in this life: without it nothing is asked of it.
        self.ready = False
        # Operations that the engine works on and that this log knows nothing of.
        self.foreign: dict[OpId, None] = {}
        self.names: dict[str, AdapterId] = {}
        self.adapters: Ledger[AdapterId, Adapter] = Ledger()
        self.slots: Ledger[int, Slot] = Ledger()
        self.answers: Ledger[RequestId, Reply] = Ledger()
        # What is under way is little and changes with every input: it is digested whole.
        self.operations: dict[OpId, Operation] = {}
        self.waiting: dict[RequestId, Waiting] = {}
        self.tiers: dict[TierName, Tier] = {tier: Tier() for tier in TIERS}
        # Batches that the engine has not been asked to confirm, in order; one is driven at a time.
        self.batches: OrderedDict[RequestId, None] = OrderedDict()
        self.driven: RequestId = ""
        self._derive(limits)

    def _derive(self, limits: Limits) -> None:
        """Indexes over the facts above: they could be rebuilt from them."""
        self.resize(limits.slots_max)
        self.set_bounds(limits)
        # Keys of `answers` in order: a dict's own first key is slow to find once many are gone.
        self.answer_order: deque[RequestId] = deque()
        # Adapters by state in the order of `touched`; the first is the first to go.
        self.recency: dict[AdapterState, OrderedDict[AdapterId, None]] = {
            state: OrderedDict() for state in RESIDENT
        }
        self.queues = Queues()
        # Adapters whose goal lies below what they hold: their room is on its way.
        self.leaving: dict[AdapterId, None] = {}
        # Adapters whose goal lies above what they hold: driven again when an engine is back.
        self.striving: dict[AdapterId, None] = {}
        self.held: dict[AdapterId, None] = {}
        # A heap, with entries of ended things left in until they surface or are too many.
        self.deadlines: list[Deadline] = []
        self.deadlines_max = DEADLINES_MIN
        self.timer_ns = 0

    def resize(self, slots_max: int) -> None:
        """Have this many slots, all free."""
        for index in range(slots_max, len(self.slots)):
            del self.slots[index]
        for index in range(len(self.slots), slots_max):
            self.slots[index] = Slot()
        self.free_slots = list(range(slots_max))

    def set_bounds(self, limits: Limits) -> None:
        """Bound the tiers: by the limits, and by the engine where that is smaller."""
        host, pinned, device = (self.tiers[tier] for tier in TIERS)
        host.count_max, host.size_bytes_max = limits.host_adapters_max, limits.host_bytes_max
        pinned.count_max, pinned.size_bytes_max = limits.host_adapters_max, limits.pinned_bytes_max
        device.count_max = device.size_bytes_max = 0
        if self.engine is not None:
            device.count_max = min(limits.slots_max, self.engine.slots_max)
            device.size_bytes_max = min(limits.device_bytes_max, self.engine.device_bytes_max)

    def current(self, name: str) -> Adapter | None:
        """The version that a name stands for now."""
        adapter_id = self.names.get(name)
        return None if adapter_id is None else self.adapters[adapter_id]

    def add_deadline(self, at_ns: int, kind: DeadlineKind, key: int | str) -> None:
        """Remember to look at this at `at_ns`."""
        heapq.heappush(self.deadlines, (at_ns, kind, key))
        if len(self.deadlines) > self.deadlines_max:
            self.deadlines = [entry for entry in self.deadlines if self.is_live(entry)]
            heapq.heapify(self.deadlines)
            self.deadlines_max = 2 * len(self.deadlines) + DEADLINES_MIN

    def is_live(self, entry: Deadline) -> bool:
        """Whether what the deadline was for still waits."""
        _, kind, key = entry
        if kind == "operation":
            return key in self.operations
        if kind == "request":
            return key in self.waiting
        adapter = self.adapters.get(key)  # type: ignore[arg-type]
        return adapter is not None and adapter.resting

    def digest(self) -> str:
        """A hash of every fact: 32 hex characters, the same for the same history anywhere."""
        return self._digest([ledger.digest() for ledger in self._ledgers()])

    def digest_from_scratch(self) -> str:
        """The same with nothing remembered."""
        return self._digest([ledger.digest_from_scratch() for ledger in self._ledgers()])

    def _ledgers(self) -> tuple[Ledger, ...]:  # type: ignore[type-arg]
        return (self.adapters, self.slots, self.answers)

    def _digest(self, sums: list[int]) -> str:
        facts = (
            [str(value) for value in sums],
            (self.seq, self.time_ns, self.epoch, self.events_seq, self.clock),
            (self.next_op, self.next_adapter_id, self.next_generation),
            (self.answered, self.refused),
            (self.engine, self.ready, list(self.foreign)),
            [self.tiers[tier] for tier in TIERS],
            [self.queues.lines[tier] for tier in TIERS],
            (list(self.batches), self.driven),
            (list(self.operations.items()), list(self.waiting.items())),
        )
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))
