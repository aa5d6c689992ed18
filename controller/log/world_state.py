"""The state of a `World` as a snapshot stores it, and a world's restoration from it.

`WorldState` has every field that `controller/core/restore.py` can't compute from the others, with
the order of the entries: the inputs after a restored world then lead to the same actions as before.
"""

from collections import OrderedDict
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import Struct

from loradock.controller.core.answers import Answer
from loradock.controller.core.counters import Counters
from loradock.controller.core.indexes import DigestDict, TierName
from loradock.controller.core.restore import derive
from loradock.controller.core.world import (
    Adapter,
    AttachedEngine,
    Operation,
    PendingRequest,
    Slot,
    Tier,
    World,
)
from loradock.messages.ids import AdapterId, Epoch, OpId, RequestId, Seq
from loradock.messages.views import Warnings


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
    unknown_operations: dict[OpId, int]
    adapters: list[Adapter]
    slots: list[Slot]
    answers: list[Answer]
    operations: dict[OpId, Operation]
    pending_requests: dict[RequestId, PendingRequest]
    tiers: dict[TierName, Tier]
    batches: list[RequestId]
    current_batch: str
    totals: Counters
    past_counters: Counters
    base_counters: Counters
    answers_chain: bytes
    warnings: dict[AdapterId, Warnings] = {}


_OTHERS: Final = ("adapters", "slots", "answers", "batches", "warnings")
"""The fields that are rebuilt: of all but the last the values are stored, or the keys, as lists."""

_SAME: Final = tuple(name for name in WorldState.__struct_fields__ if name not in _OTHERS)
"""The fields that are stored as they are."""

_id: Final = attrgetter("id")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(WorldState).decode


def encode_world(world: World) -> bytes:
    """Return the world's state in msgpack."""
    values: dict[str, Any] = {
        **{name: getattr(world, name) for name in _SAME},
        "adapters": list(world.adapters.values()),
        "slots": list(world.slots.values()),
        "answers": list(world.answers.by_id.values()),
        "batches": list(world.batches),
        "warnings": world.warnings,
    }
    return _encode([values[name] for name in WorldState.__struct_fields__])


def restore_world(world: World, data: bytes) -> None:
    """Give a new world the state in `data`, which was encoded under the same limits.

    Raises `msgspec.DecodeError`, `UnicodeDecodeError` or `RecursionError` for other bytes.
    """
    state = _decode(data)
    for name in _SAME:
        setattr(world, name, getattr(state, name))
    world.adapters = DigestDict.of(zip(map(_id, state.adapters), state.adapters, strict=True))
    world.slots = DigestDict.of(enumerate(state.slots))
    world.warnings = DigestDict.of(state.warnings.items())
    world.answers.restore(state.answers)
    world.batches = OrderedDict.fromkeys(state.batches)
    derive(world)
