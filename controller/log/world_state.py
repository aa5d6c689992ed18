"""The state of a `World` as a snapshot stores it, and a world's restoration from it.

`WorldState` has every field that can't be computed from the others, in the order of the fields:
the inputs after a restored world then lead to the same actions as before. Stored are also the order
of the goals' indexes, and deadlines of things that have ended, because a repeated request may make
them count again.
"""

from collections import OrderedDict, deque
from typing import Any, Final

import msgspec
from msgspec import Struct

from controller.core.digest_dict import DigestDict
from controller.core.tier_queues import TIERS, TierName
from controller.core.world import (
    RESIDENT,
    Adapter,
    AttachedEngine,
    Deadline,
    Operation,
    PendingRequest,
    Slot,
    Tier,
    World,
)
from messages.ids import AdapterId, Epoch, OpId, RequestId, Seq
from messages.requests import Reply

DERIVED: Final = ("answer_order", "free_slots", "lru_order", "names")
"""The fields of a world that are computed from others."""


class WorldState(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The fields of a world, under their names; values of maps that know their key are lists."""

    seq: Seq
    time_ns: int
    wall_offset_ns: int
    epoch: Epoch
    next_op: OpId
    next_adapter_id: AdapterId
    next_generation: int
    events_seq: Seq
    lru_counter: int
    answered: int
    refused: int
    engine: AttachedEngine | None
    engine_ready: bool
    unknown_operations: dict[OpId, int | None]
    adapters: list[Adapter]
    slots: list[Slot]
    answers: list[Reply]
    operations: dict[OpId, Operation]
    pending_requests: dict[RequestId, PendingRequest]
    tiers: dict[TierName, Tier]
    batches: list[RequestId]
    current_batch: str
    queues: dict[TierName, list[tuple[Seq, AdapterId]]]
    demoting: list[AdapterId]
    promoting: list[AdapterId]
    held: list[AdapterId]
    deadlines: list[Deadline]
    deadlines_max: int
    timer_ns: int


_SAME: Final = (
    *("seq", "time_ns", "wall_offset_ns", "epoch", "next_op", "next_adapter_id"),
    *("next_generation", "events_seq", "lru_counter", "answered", "refused", "engine"),
    *(
        "engine_ready",
        "unknown_operations",
        "operations",
        "pending_requests",
        "tiers",
        "current_batch",
        "deadlines",
    ),
    *("deadlines_max", "timer_ns"),
)
"""The fields that are stored as they are."""

_KEYS: Final = ("demoting", "promoting", "held")
"""Dicts of keys without values, which are stored as lists."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(WorldState).decode


def encode_world(world: World) -> bytes:
    """Return the world's state in msgpack."""
    values: dict[str, Any] = {
        **{name: getattr(world, name) for name in _SAME},
        **{name: list(getattr(world, name)) for name in _KEYS},
        "adapters": list(world.adapters.values()),
        "slots": list(world.slots.values()),
        "answers": list(world.answers.values()),
        "batches": list(world.batches),
        "queues": world.queues.by_tier,
    }
    return _encode([values[name] for name in WorldState.__struct_fields__])


def restore_world(world: World, data: bytes) -> None:
    """Give a new world the state in `data`, which was encoded under the same limits.

    Raises `msgspec.DecodeError`, `UnicodeDecodeError` or `RecursionError` for other bytes.
    """
    state = _decode(data)
    for name in _SAME:
        setattr(world, name, getattr(state, name))
    for name in _KEYS:
        setattr(world, name, dict.fromkeys(getattr(state, name)))
    world.adapters = DigestDict.of((adapter.id, adapter) for adapter in state.adapters)
    world.slots = DigestDict.of(enumerate(state.slots))
    world.answers = DigestDict.of((reply.request_id, reply) for reply in state.answers)
    world.batches = OrderedDict.fromkeys(state.batches)
    for tier in TIERS:
        for priority, adapter_id in state.queues[tier]:
            world.queues.join(tier, adapter_id, priority)
    _derive(world)


def _derive(world: World) -> None:
    """Compute the fields of `DERIVED`."""
    adapters = world.adapters.values()
    world.answer_order = deque(world.answers)
    # A sorted list is a heap.
    world.free_slots = [index for index, slot in world.slots.items() if not slot.adapter_id]
    world.names = {a.name: a.id for a in adapters if not (a.retired or a.predecessor)}
    world.lru_order = {state: OrderedDict() for state in RESIDENT}
    resident = [adapter for adapter in adapters if adapter.state in world.lru_order]
    for adapter in sorted(resident, key=lambda a: a.lru_stamp):
        world.lru_order[adapter.state][adapter.id] = None
