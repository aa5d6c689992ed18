"""Events that the controller publishes: the life-cycle stream, numbered without gaps.

The stream is a function of the log: an event of any age can be read again, with the same number.
"""

from typing import Final, Literal

from loradock.messages.base import Message, Value
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    CPU_CACHED,
    EVICTED,
    GPU_SLOT,
    PINNED,
    AdapterName,
    AdapterState,
    Bytes,
    Epoch,
    Generation,
    OpId,
    Seq,
    Slot,
)

EvictionReason = Literal["policy", "request", "engine-lost"]


class AdapterAccepted(Message, frozen=True):
    """An adapter's files passed all checks, which took `duration_ns`."""

    adapter: AdapterName
    fingerprint: str
    rank: int
    blob_bytes: Bytes
    duration_ns: int = 0


class AdapterCached(Message, frozen=True):
    """The weights are in host memory: cpu-cached. A duration of 0: an engine already had them."""

    adapter: AdapterName
    duration_ns: int = 0


class AdapterPinned(Message, frozen=True):
    """The weights are packed for a copy: pinned. A duration of 0: an engine already had them."""

    adapter: AdapterName
    duration_ns: int = 0


class AdapterActivated(Message, frozen=True):
    """The adapter is in a slot: gpu-slot. A duration of 0: an engine already had it there.

    `wait_ns`: how long the first of the requests that it is there for has waited; 0 without any.
    """

    adapter: AdapterName
    slot: Slot
    generation: Generation
    duration_ns: int = 0
    wait_ns: int = 0


class AdapterDeactivated(Message, frozen=True):
    """The adapter left its slot: pinned."""

    adapter: AdapterName
    slot: Slot


class AdapterUnpinned(Message, frozen=True):
    """The packed weights were dropped: cpu-cached."""

    adapter: AdapterName


class AdapterEvicted(Message, frozen=True):
    """All weights were dropped: evicted, by the policy, by a request, or with the engine."""

    adapter: AdapterName
    reason: EvictionReason


class AdapterRemoved(Message, frozen=True):
    """The adapter was removed: its name is free. Requests that came before can still end."""

    adapter: AdapterName


class AdapterReplaced(Message, frozen=True):
    """A new version took over the name; the old version ends its requests and is then dropped."""

    adapter: AdapterName
    fingerprint: str


class AdapterRetired(Message, frozen=True):
    """A replaced or removed version ended its last request and was dropped.

    Another version can have the name.
    """

    adapter: AdapterName
    fingerprint: str


class AdapterHeld(Message, frozen=True):
    """A hold began: no policy can evict the adapter."""

    adapter: AdapterName


class AdapterReleased(Message, frozen=True):
    """A hold ended: policies can evict the adapter."""

    adapter: AdapterName


class AdapterFailed(Message, frozen=True):
    """An operation on the adapter failed; the adapter stayed in `state`."""

    adapter: AdapterName
    state: AdapterState
    code: ErrorCode
    message: str


class OperationOverdue(Message, frozen=True):
    """The engine has not reported in time; clients were answered, a late report still counts."""

    op: OpId
    kind: str
    adapter: str


class PolicyFailed(Message, frozen=True):
    """The eviction policy raised or chose a wrong adapter; `lru` decides until it is changed."""

    policy: str
    reason: str


class GenerationFinished(Message, frozen=True):
    """Result of a generation; `adapter` is empty for the base model.

    `duration_ns`: the time since it was accepted, waits included.
    """

    adapter: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    duration_ns: int = 0


class PoolingFinished(Message, frozen=True):
    """Result of an `Embed` or `Classify` (`task`); `adapter` is empty for the base model.

    `duration_ns`: the time since it was accepted, waits included.
    """

    adapter: str
    task: str
    outcome: str
    inputs: int
    input_tokens: int
    duration_ns: int = 0


class ReportRefused(Message, frozen=True):
    """The engine reported a transition that is not allowed; nothing was changed."""

    op: OpId
    message: str


class ControllerResumed(Message, frozen=True):
    """The controller started a new epoch from its log."""

    epoch: Epoch


class EngineAttached(Message, frozen=True):
    """An engine is attached: adapters are moved towards their goals again."""

    engine_id: str
    model: str


class EngineDetached(Message, frozen=True):
    """The engine is lost, and with it all weights: every adapter is evicted."""

    engine_id: str
    reason: str


class EventWithheld(Message, frozen=True):
    """An event whose content the key that fetches is not allowed to see; its number is kept."""


Event = (
    AdapterAccepted
    | AdapterCached
    | AdapterPinned
    | AdapterActivated
    | AdapterDeactivated
    | AdapterUnpinned
    | AdapterEvicted
    | AdapterRemoved
    | AdapterReplaced
    | AdapterRetired
    | AdapterHeld
    | AdapterReleased
    | AdapterFailed
    | OperationOverdue
    | GenerationFinished
    | PoolingFinished
    | ReportRefused
    | ControllerResumed
    | EngineAttached
    | EngineDetached
    | EventWithheld
    | PolicyFailed
)

STATE_AFTER: Final[dict[type[Message], AdapterState]] = {
    AdapterCached: CPU_CACHED,
    AdapterUnpinned: CPU_CACHED,
    AdapterPinned: PINNED,
    AdapterDeactivated: PINNED,
    AdapterActivated: GPU_SLOT,
    AdapterEvicted: EVICTED,
}
"""The state of an adapter after an event that changes it."""


class Published(Value, frozen=True):
    """An event with its number in the stream and the wall time of the input that caused it.

    `time_ns` (UTC) is a label: it can decrease if the wall clock was set back before a start.
    """

    seq: Seq
    time_ns: int
    event: Event
