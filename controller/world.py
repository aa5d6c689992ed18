"""All that the controller knows: adapters, slots, the engine, operations, requests.

What it is: state with its accounts, invariants and digest. What it is not: decisions (`core` and
the modules it calls are the only writers). One rule: nothing here depends on a clock, on chance or
on the process, so that folding the same inputs gives the same digest anywhere.
"""

import heapq
from typing import Final, Literal

import msgspec
import xxhash
from msgspec import Struct

from controller.ledger import Ledger
from controller.limits import Limits
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
)
from messages.requests import Reply

TierName = Literal["host", "pinned", "device"]
RequestKind = Literal[
    "load", "stage", "activate", "hold", "deactivate", "evict", "remove", "batch", "generate"
]

RESIDENT: Final = (CPU_CACHED, PINNED, GPU_SLOT)


class Adapter(Struct, array_like=True, gc=False):
    """One version of an adapter: its state (a fact), its goal (a wish) and its books.

    `host_bytes`, `pinned_bytes` and `device_bytes` are what it is charged for now, reservations of
    an operation in flight included; `load_bytes` and `blob_bytes` what it will take.
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
    retired: bool = False
    # The version that may take over this name, and the version that this one may take over from.
    successor: AdapterId = 0
    predecessor: AdapterId = 0
    leases: int = 0
    op: OpId = 0
    waiters: tuple[RequestId, ...] = ()
    # The world's counter at its last use or move: the order in which victims are looked for.
    touched: int = 0
    last_used_ns: int = 0
    uses: int = 0
    loads: int = 0
    hits: int = 0
    evictions: int = 0
    failures: int = 0


class Slot(Struct, array_like=True, gc=False):
    """One device slot; `adapter_id` 0 means free, else reserved or occupied."""

    generation: int = 0
    adapter_id: AdapterId = 0


class Operation(Struct, array_like=True, gc=False):
    """One command that the engine has not reported on."""

    kind: str
    adapter_id: AdapterId
    slot: int
    generation: int
    deadline_ns: int
    request_id: RequestId | None = None
    overdue: bool = False


class Waiting(Struct, array_like=True, gc=False):
    """One accepted request without its answer.

    `told` marks a generation whose client gave up: it is answered, and its lease still runs.
    """

    kind: RequestKind
    adapters: tuple[AdapterId, ...]
    target: AdapterState
    deadline_ns: int
    op: OpId = 0
    replace: bool = False
    told: bool = False


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
        self.events_seq = 0
        self.clock = 0
        self.answered = 0
        self.refused = 0
        self.engine: Engine | None = None
        self.names: dict[str, AdapterId] = {}
        self.adapters: Ledger[AdapterId, Adapter] = Ledger()
        self.slots: Ledger[int, Slot] = Ledger()
        self.operations: Ledger[OpId, Operation] = Ledger()
        self.waiting: Ledger[RequestId, Waiting] = Ledger()
        self.answers: Ledger[RequestId, Reply] = Ledger()
        self.tiers: dict[TierName, Tier] = {"host": Tier(), "pinned": Tier(), "device": Tier()}
        self.batches: dict[RequestId, None] = {}
        self._derive(limits)

    def _derive(self, limits: Limits) -> None:
        """Indexes over the facts above: rebuilt from them, never in the digest."""
        self.resize(limits.slots_max)
        # Adapters by state in the order of `touched`; the first is the first to go.
        self.recency: dict[AdapterState, dict[AdapterId, None]] = {s: {} for s in RESIDENT}
        # Adapters that wait for room in a tier, first come first served.
        self.queues: dict[TierName, dict[AdapterId, None]] = {
            "host": {},
            "pinned": {},
            "device": {},
        }
        # Which queue an adapter is in.
        self.queued: dict[AdapterId, TierName] = {}
        # Adapters whose goal lies below what they hold: their room is on its way.
        self.leaving: dict[AdapterId, None] = {}
        # Adapters whose goal lies above what they hold: driven again when an engine is back.
        self.striving: dict[AdapterId, None] = {}
        self.held: dict[AdapterId, None] = {}
        # (deadline, kind, key), with entries of ended things left in until they surface.
        self.deadlines: list[tuple[int, str, int | str]] = []
        self.timer_ns = 0

    def resize(self, slots_max: int) -> None:
        """Have this many slots, all free; generations go on where they were."""
        for index in range(slots_max, len(self.slots)):
            del self.slots[index]
        for index in range(len(self.slots), slots_max):
            self.slots[index] = Slot()
        self.free_slots = list(range(slots_max))

    def current(self, name: str) -> Adapter | None:
        """The version that a name stands for now."""
        adapter_id = self.names.get(name)
        return None if adapter_id is None else self.adapters[adapter_id]

    def add_deadline(self, at_ns: int, kind: str, key: int | str) -> None:
        """Remember to look at this operation or request at `at_ns`."""
        heapq.heappush(self.deadlines, (at_ns, kind, key))
        live = len(self.operations) + len(self.waiting)
        if len(self.deadlines) > 2 * live + 1024:
            self.deadlines = [entry for entry in self.deadlines if self.is_live(entry)]
            heapq.heapify(self.deadlines)

    def is_live(self, entry: tuple[int, str, int | str]) -> bool:
        """Whether what the deadline was for still waits."""
        _, kind, key = entry
        return key in self.operations if kind == "op" else key in self.waiting

    def digest(self) -> str:
        """A hash of every fact: 32 hex characters, the same for the same history anywhere."""
        return self._digest([ledger.digest() for ledger in self._ledgers()])

    def digest_from_scratch(self) -> str:
        """The same with nothing remembered."""
        return self._digest([ledger.digest_from_scratch() for ledger in self._ledgers()])

    def _ledgers(self) -> tuple[Ledger, ...]:  # type: ignore[type-arg]
        return (self.adapters, self.slots, self.operations, self.waiting, self.answers)

    def _digest(self, sums: list[int]) -> str:
        facts = (
            [str(value) for value in sums],
            (self.seq, self.time_ns, self.epoch, self.next_op, self.next_adapter_id),
            (self.events_seq, self.clock, self.answered, self.refused),
            self.engine,
            [self.tiers["host"], self.tiers["pinned"], self.tiers["device"]],
            [list(queue) for queue in self.queues.values()],
            list(self.batches),
        )
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))
