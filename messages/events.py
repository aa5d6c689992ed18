"""What the controller publishes: the life-cycle stream.

What it is: past-tense Structs, each told once, numbered without gaps. What it is not: a command
or a promise. One rule: the stream is a function of the log, so an event of any age can be told
again with the same number.
"""

from typing import Literal

from messages.base import Message, Value
from messages.errors import ErrorCode
from messages.ids import AdapterName, AdapterState, Bytes, Epoch, Generation, OpId, Seq, Slot

EvictionReason = Literal["policy", "request", "engine-lost"]


class AdapterAccepted(Message, frozen=True):
    """An adapter's files were found sound."""

    adapter: AdapterName
    fingerprint: str
    rank: int
    blob_bytes: Bytes


class AdapterCached(Message, frozen=True):
    """unregistered or evicted -> cpu-cached."""

    adapter: AdapterName


class AdapterPinned(Message, frozen=True):
    """cpu-cached -> pinned."""

    adapter: AdapterName


class AdapterActivated(Message, frozen=True):
    """pinned -> gpu-slot."""

    adapter: AdapterName
    slot: Slot
    generation: Generation


class AdapterDeactivated(Message, frozen=True):
    """gpu-slot -> pinned."""

    adapter: AdapterName
    slot: Slot


class AdapterUnpinned(Message, frozen=True):
    """pinned -> cpu-cached."""

    adapter: AdapterName


class AdapterEvicted(Message, frozen=True):
    """Any resident state -> evicted."""

    adapter: AdapterName
    reason: EvictionReason


class AdapterRemoved(Message, frozen=True):
    """The name is free again."""

    adapter: AdapterName


class AdapterReplaced(Message, frozen=True):
    """A new version took over the name; the old one ends its requests and goes."""

    adapter: AdapterName
    fingerprint: str


class AdapterRetired(Message, frozen=True):
    """An old version ended its last request and is gone; the name goes on with the new one."""

    adapter: AdapterName
    fingerprint: str


class AdapterHeld(Message, frozen=True):
    """No policy may evict it now."""

    adapter: AdapterName


class AdapterReleased(Message, frozen=True):
    """Policies may evict it again."""

    adapter: AdapterName


class AdapterFailed(Message, frozen=True):
    """An operation on it failed; it stayed in `state`."""

    adapter: AdapterName
    state: AdapterState
    code: ErrorCode
    message: str


class OperationOverdue(Message, frozen=True):
    """The engine has not reported in time; clients were told, a late report still counts."""

    op: OpId
    kind: str
    adapter: str


class GenerationFinished(Message, frozen=True):
    """A generation's account; `adapter` is empty for the base model."""

    adapter: str
    outcome: str
    prompt_tokens: int
    output_tokens: int


class PoolingFinished(Message, frozen=True):
    """The account of an `Embed` or `Classify` (`task`); `adapter` is empty for the base model."""

    adapter: str
    task: str
    outcome: str
    inputs: int
    input_tokens: int


class ReportRefused(Message, frozen=True):
    """The engine said something that the life cycle does not allow; nothing was changed."""

    op: OpId
    message: str


class ControllerResumed(Message, frozen=True):
    """A new life of the controller began from the log."""

    epoch: Epoch


class EngineAttached(Message, frozen=True):
    """An engine is there; goals are driven again."""

    engine_id: str
    model: str


class EngineDetached(Message, frozen=True):
    """The engine is gone, and with it all weights."""

    engine_id: str
    reason: str


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
)


class Published(Value, frozen=True):
    """An event in its place: its number in the stream and the time of the input that caused it."""

    seq: Seq
    time_ns: int
    event: Event
